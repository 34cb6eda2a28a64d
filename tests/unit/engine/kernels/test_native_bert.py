"""BERT and XLM-RoBERTa by machd's own kernels: what mlx-vlm's modules give for each text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import GELU
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_map
from support.engines.cpu_layers import for_cpu_layers
from support.engines.native import without_kernels

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.kernels.native_bert import NativeBert, text_means

pytest.importorskip("mlx_vlm", reason="the extra vision is not installed")
pytestmark = [
    for_cpu_layers,
    pytest.mark.skipif(native_kernels() is None, reason="make setup has found no compiler"),
]

_FAMILIES = ("bert", "xlm_roberta")
_TEXTS = [[2, 9, 4, 90, 3], [2, 3], [2, *range(5, 60), 3], [2, 44, 1, 1, 8, 3]]
"""Tokens, among them XLM-RoBERTa's padding token, 1, within a text."""

_IDS = [token for text in _TEXTS for token in text]
_LENGTHS = [len(text) for text in _TEXTS]
_TYPES = [[0] * (length // 2) + [1] * (length - length // 2) for length in _LENGTHS]
_ROUNDING = 2e-5


def _model(family: str, **changes: int) -> Module:
    code = import_module(f"mlx_vlm.models.{family}.{family}")
    config = import_module(f"mlx_vlm.models.{family}.config").ModelConfig(
        **{
            "model_type": family,
            "vocab_size": 100,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 96,
            "max_position_embeddings": 80,
            "type_vocab_size": 2,
            **changes,
        }
    )
    mx.random.seed(3)
    model: Module = code.Model(config)
    model.update(tree_map(lambda one: one + 0.2 * mx.random.normal(one.shape), model.parameters()))
    return model


def _alone(model: Module, type_ids: Sequence[Sequence[int]] | None = None) -> np.ndarray:
    """Compute each text with the module, without neighbours and padding."""
    parts = []
    for at, text in enumerate(_TEXTS):
        types = None if type_ids is None else mx.array([type_ids[at]])
        parts.append(np.array(model(mx.array([text]), None, types).last_hidden_state[0]))
    return np.concatenate(parts)


@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.parametrize("types", [None, _TYPES], ids=["one type", "two types"])
def test_texts_have_the_states_that_the_module_gives_them_alone(
    family: str, types: list[list[int]] | None
) -> None:
    """Within rounding, with tokens of a second type, too; and their vectors are means of these."""
    model = _model(family)
    flat = None if types is None else [one for text in types for one in text]
    assert NativeBert.takes(model)
    expected = _alone(model, types)
    got = NativeBert(model)(_IDS, _LENGTHS, flat)
    assert not model.encoder.layer
    assert np.abs(np.array(got) - expected).max() < _ROUNDING
    means = [part.mean(0) for part in np.split(expected, np.cumsum(_LENGTHS)[:-1])]
    assert np.abs(np.array(text_means(got, _LENGTHS)) - np.stack(means)).max() < _ROUNDING


def test_text_has_the_bits_it_has_alone() -> None:
    """Whatever texts are computed with it."""
    encoder = NativeBert(_model("xlm_roberta"))
    together = np.array(encoder(_IDS, _LENGTHS))
    alone = [np.array(encoder(text, [len(text)])) for text in _TEXTS]
    assert np.array_equal(together, np.concatenate(alone))


def test_text_has_the_bits_it_has_alone_beside_a_pair() -> None:
    """Tokens of a second type in one text change no bit of another, which has none."""
    encoder = NativeBert(_model("bert"))
    types = [0] * (sum(_LENGTHS) - _LENGTHS[-1]) + _TYPES[-1]
    together = np.array(encoder(_IDS, _LENGTHS, types))
    first = _LENGTHS[0]
    assert np.array_equal(together[:first], np.array(encoder(_TEXTS[0], [first])))


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        (_IDS, [sum(_LENGTHS)]),
        (_IDS, [*_LENGTHS[:2], _LENGTHS[2] + 1, _LENGTHS[3] - 1]),
        ([*_IDS[1:], _IDS[0]], _LENGTHS),
        (_IDS, [_LENGTHS[0] - 1, _LENGTHS[1] + 1, *_LENGTHS[2:]]),
    ],
    ids=["one text", "a neighbour's token", "shifted tokens", "a token given up"],
)
def test_comparison_notices_other_texts(ids: list[int], lengths: list[int]) -> None:
    """What a wrong offset or a forgotten mask would give is far outside rounding."""
    model = _model("bert")
    expected = _alone(model)
    got = np.array(NativeBert(model)(ids, lengths))
    assert np.abs(got - expected).max() > 1000 * _ROUNDING


def _quantised(model: Module) -> None:
    quantize(model, 32, 4)


def _of_another_gelu(model: Module) -> None:
    model.encoder.layer[1].intermediate.intermediate_act_fn = GELU("tanh")


def _of_16_bits(model: Module) -> None:
    model.update(tree_map(lambda one: one.astype(mx.bfloat16), model.parameters()))


def _of_another_class(model: Module) -> None:
    model.embeddings = Module()


@pytest.mark.parametrize("change", [_quantised, _of_16_bits, _of_another_gelu, _of_another_class])
def test_models_of_other_layers_are_left_to_mlx(change: Callable[[Module], None]) -> None:
    """Packed weights, 16-bit ones, another activation and another family."""
    model = _model("bert")
    change(model)
    assert not NativeBert.takes(model)


@pytest.mark.parametrize("changes", [{"num_attention_heads": 8}, {"intermediate_size": 100}])
def test_models_of_other_sizes_are_left_to_mlx(changes: dict[str, int]) -> None:
    """Heads and outputs that are no multiples of 16."""
    assert not NativeBert.takes(_model("bert", **changes))


def test_models_are_left_to_mlx_when_kernels_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller takes the padded path then."""
    without_kernels(monkeypatch)
    assert not NativeBert.takes(_model("bert"))


@pytest.mark.parametrize(
    ("ids", "lengths", "types"),
    [
        ([2, 100], [2], None),
        ([2, -1], [2], None),
        ([2, 3], [1], None),
        ([2, 3], [2, 0], None),
        ([2, 3], [2], [0, 2]),
        ([5] * 81, [81], None),
    ],
)
def test_numbers_outside_of_tables_are_refused(
    ids: list[int], lengths: list[int], types: list[int] | None
) -> None:
    """MLX would read whatever lies there."""
    with pytest.raises(ValueError, match=r"outside its table|texts have tokens"):
        NativeBert(_model("bert"))(ids, lengths, types)


def test_longest_text_has_as_many_tokens_as_positions() -> None:
    """XLM-RoBERTa's first positions are for padding tokens."""
    for family, most in (("bert", 80), ("xlm_roberta", 78)):
        encoder = NativeBert(_model(family))
        assert encoder([5] * most, [most]).shape == (most, 64)
        with pytest.raises(ValueError, match="position is outside"):
            encoder([5] * (most + 1), [most + 1])
