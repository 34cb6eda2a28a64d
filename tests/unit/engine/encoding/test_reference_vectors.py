"""Encoders of every family against transformers and sentence-transformers, and faults that the comparison has to notice.

``reference_vectors.json`` has for each checkpoint of ``machd_probes.encoder_matrix.tiny_encoders`` and each of its lengths what transformers
5.24.0 and sentence-transformers 6.2.0 compute of the same files and tokens in float32, one text at a time, with eager attention:
``AutoModel(input_ids, attention_mask=ones).last_hidden_state``, then ``Pooling``, ``Dense`` and ``Normalize`` of the
checkpoint's own folders; of classifiers ``AutoModelForSequenceClassification(...).logits``, of pairs with ``token_type_ids`` of 1
from half of the tokens on. The llama and NVIDIA's, which transformers has not, are computed by the same class with an additive mask
of zeros, which makes it see both ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.activations import GELU
from support.engines.loaded_encoder import Vectors, least_cosine, loaded_encoder, vectors

from machd.engine.encoding import bodies, encoder_model, mlx_encoder
from machd.engine.encoding.pooling import pool
from machd.engine.kernels.native_bert import NativeBert
from machd.engine.protocol.encoder import Encoder, EncoderInput
from machd_probes.encoder_matrix.tiny_checkpoint import token_ids, write_encoder
from machd_probes.encoder_matrix.tiny_encoders import LENGTHS, PAIRED, TINY_ENCODERS

_REFERENCES: dict[str, list[list[float]]] = json.loads(
    (Path(__file__).parent / "reference_vectors.json").read_text(encoding="utf-8")
)
_SAME = 1 - 1e-9
"""Found are 1 - 1e-12; an activation that is nearly the right one leaves 1 - 1e-7."""
_SAME_LOGIT = 1e-4

_EMBEDDERS = [name for name, one in TINY_ENCODERS.items() if one.pooling]
_CLASSIFIERS = [name for name, one in TINY_ENCODERS.items() if not one.pooling]


def _inputs(name: str) -> list[EncoderInput]:
    is_pair = name in PAIRED
    return [EncoderInput(token_ids(one), one // 2 if is_pair else None) for one in LENGTHS]


def _pad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute all texts by mlx, padded, where machd's own kernels would take them behind one another."""
    monkeypatch.setattr(NativeBert, "takes", staticmethod(lambda _model: False))


def _load(name: str, directory: Path) -> Encoder:
    return loaded_encoder(write_encoder(directory / name, TINY_ENCODERS[name]))


def _is_same(name: str, found: Vectors) -> bool:
    wanted = np.array(_REFERENCES[name])
    if name in _CLASSIFIERS:
        return bool(np.abs(found - wanted).max() < _SAME_LOGIT)
    # Lengths count where vectors are not normalised.
    lengths = np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
    return least_cosine(found, wanted) > _SAME and bool(np.abs(lengths - 1).max() < _SAME_LOGIT)


def test_every_tiny_encoder_has_references() -> None:
    """Every checkpoint has references of every length, and they differ from text to text."""
    assert _REFERENCES.keys() == TINY_ENCODERS.keys()
    for rows in _REFERENCES.values():
        assert len({tuple(row) for row in rows}) == len(rows) == len(LENGTHS)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_vectors_are_those_of_the_reference_alone_and_in_a_pass(
    name: str, is_packed: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text has the reference's vector or logits alone, and beside others padded and behind one another."""
    if not is_packed:
        _pad(monkeypatch)
    encoder, inputs = _load(name, tmp_path), _inputs(name)
    if is_packed and not encoder.packs:
        pytest.skip("machd's own kernels do not compute it here")
    alone = np.concatenate([vectors(encoder, [one]) for one in inputs])
    together = vectors(encoder, inputs)
    assert _is_same(name, alone)
    assert _is_same(name, together)
    if name in _EMBEDDERS:
        assert least_cosine(alone, together) > _SAME


@pytest.mark.parametrize("name", _EMBEDDERS)
def test_a_neighbour_changes_no_vector(name: str, tmp_path: Path) -> None:
    """A text has the same vector beside any other text, whatever its place in the pass."""
    encoder = _load(name, tmp_path)
    text, *others = (EncoderInput(token_ids(one, seed=7)) for one in (11, 3, 40, 29))
    alone = vectors(encoder, [text])
    for neighbour in others:
        assert least_cosine(alone, vectors(encoder, [text, neighbour])[:1]) > _SAME
        assert least_cosine(alone, vectors(encoder, [neighbour, text])[1:]) > _SAME


def _forget_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bodies, "key_mask", lambda _lengths, tokens: mx.ones((1, 1, 1, tokens), mx.bool_)
    )


def _forget_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bodies, "window_mask", lambda lengths, tokens, _reach: bodies.key_mask(lengths, tokens)
    )


def _widen_window(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bodies.window_mask
    monkeypatch.setattr(
        bodies, "window_mask", lambda lengths, tokens, reach: right(lengths, tokens, reach + 1)
    )


def _widen_causal_window(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bodies.causal_window_mask
    monkeypatch.setattr(
        bodies, "causal_window_mask", lambda tokens, window: right(tokens, window + 1)
    )


def _pool_by(mode: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = pool
        monkeypatch.setattr(
            mlx_encoder, "pool", lambda hidden, lengths, _modes: right(hidden, lengths, [mode])
        )

    return plant


def _pool_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the last column and the mean of all, as where padding is at the left or has been forgotten."""
    right = pool

    def pool_all(hidden: mx.array, _lengths: mx.array, modes: Sequence[str]) -> mx.array:
        rows, tokens = hidden.shape[:2]
        return right(hidden, mx.full((rows,), tokens, dtype=mx.int32), modes)

    monkeypatch.setattr(mlx_encoder, "pool", pool_all)


def _swap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pool

    def pool_rolled(hidden: mx.array, lengths: mx.array, modes: Sequence[str]) -> mx.array:
        pooled = right(hidden, lengths, modes)
        return mx.concatenate([pooled[-1:], pooled[:-1]])

    monkeypatch.setattr(mlx_encoder, "pool", pool_rolled)


def _forget_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_encoder, "normalise", lambda found: found)


def _approximate_gelu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_model, "GELU", lambda: GELU(approx="tanh"))


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("bert", _forget_padding),
        ("xlm-roberta", _forget_padding),
        ("modernbert", _forget_padding),
        ("gemma3_text", _forget_padding),
        ("llama", _forget_padding),
        ("bert-reranker", _forget_padding),
        ("modernbert", _forget_window),
        ("gemma3_text", _forget_window),
        ("modernbert", _widen_window),
        ("gemma3_text", _widen_window),
        ("mistral", _widen_causal_window),
        ("bert", _pool_by("cls")),
        ("bert-cls", _pool_by("mean")),
        ("bert-root", _pool_by("mean")),
        ("qwen3", _pool_by("mean")),
        ("bert", _pool_padding),
        ("bert-max", _pool_padding),
        ("bert-weighted", _pool_padding),
        ("qwen3", _pool_padding),
        ("bert", _swap_rows),
        ("bert", _forget_length),
        ("gemma3_text", _forget_length),
        ("modernbert", _approximate_gelu),
    ],
)
def test_a_planted_fault_is_noticed(
    name: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mask, a pooling, a row or an activation that is wrong makes other vectors than the reference's."""
    _pad(monkeypatch)
    plant(monkeypatch)
    assert not _is_same(name, vectors(_load(name, tmp_path), _inputs(name)))


def test_a_padding_token_inside_a_text_has_the_same_vector_in_both_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RoBERTa numbers no position for its padding token, which a text may name; neighbours change nothing of it."""
    texts = [EncoderInput((5, 1, 30, 1, 40)), EncoderInput(token_ids(12)), EncoderInput((1, 1))]
    encoder = _load("xlm-roberta", tmp_path)
    if not encoder.packs:
        pytest.skip("machd's own kernels do not compute it here")
    packed = vectors(encoder, texts)
    _pad(monkeypatch)
    padded = _load("xlm-roberta", tmp_path)
    assert least_cosine(packed, vectors(padded, texts)) > _SAME
    assert least_cosine(packed[:1], vectors(padded, texts[:1])) > _SAME


def test_a_second_text_counts(tmp_path: Path) -> None:
    """Tokens of the second text of a pair have their own type."""
    name = "bert-reranker"
    inputs = [EncoderInput(one.token_ids) for one in _inputs(name)]
    assert not _is_same(name, vectors(_load(name, tmp_path), inputs))


def test_padding_of_16_bits_leaves_vectors_finite(tmp_path: Path) -> None:
    """Rows that are padded far beyond a window are no NaN in float16, whose softmax of nothing is one."""
    for name in ("modernbert", "gemma3_text"):
        directory = write_encoder(tmp_path / name, TINY_ENCODERS[name])
        encoder = loaded_encoder(directory, dtype="float16")
        assert encoder.model.dtype == "float16"
        found = vectors(encoder, _inputs(name))
        assert np.isfinite(found).all()
        assert least_cosine(found, np.array(_REFERENCES[name])) > 0.99


def test_a_token_outside_the_vocabulary_is_a_fault_of_the_caller(tmp_path: Path) -> None:
    """Ids that have no row are not read from memory behind the table."""
    encoder: Any = _load("bert", tmp_path)
    for wrong in (-1, 10_000):
        with pytest.raises(AssertionError):
            encoder.encode([EncoderInput((5, wrong))])
