"""Models whose layers are one operation: the numbers of mlx-lm's own layers, and a row's bits in every company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.same_bits import assert_same_bits_alone, said

from machd.engine.assembly import make_engine
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kernels.layers_in_one import LayersInOne, compute_layers_in_one
from machd.engine.protocol.step import Lane
from machd.engine.step.mlx_engine import MlxEngine
from machd.request.generation import SamplingParams
from machd_probes.play import Join
from machd_probes.prober import tiny_loaded
from machd_probes.scripts import random_prompt

pytestmark = pytest.mark.skipif(
    native_kernels() is None, reason="make setup has found no compiler: mlx computes"
)

_VARIANTS = ("gemma3_text", "qwen3")
"""With windows and four norms a layer, and with norms of heads alone. Windows of 8 tokens turn many times in what follows."""

_TEXT = mx.array([random_prompt(90, 1), random_prompt(90, 2)])


def _caches(model: LanguageModel) -> list[Cache]:
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - after import_mlx_lm()

    caches: list[Cache] = make_prompt_cache(model)
    return caches


def _in_chunks(model: LanguageModel, chunks: Sequence[int]) -> mx.array:
    caches, begin, logits = _caches(model), 0, []
    for chunk in chunks:
        logits.append(model(_TEXT[:, begin : begin + chunk], cache=caches))
        begin += chunk
    assert begin == _TEXT.shape[1]
    return mx.concatenate(logits, axis=1)


@pytest.fixture(name="variant", scope="module", params=_VARIANTS)
def _variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(name="model", scope="module")
def _model(variant: str) -> LanguageModel:
    model = tiny_loaded(variant).model
    compute_layers_in_one(model)
    assert isinstance(model.model, _bases(model)), "it is in one"
    return model


def _bases(model: LanguageModel) -> type:
    own: type = type(model.model).former
    return own


@pytest.fixture(name="engine", scope="module")
def _engine(variant: str) -> Iterator[MlxEngine]:
    engine = make_engine(tiny_loaded(variant), max_rows=8)
    yield engine
    engine.close()


@pytest.mark.parametrize("chunks", [(90,), (1,) * 90, (40, 1, 1, 1, 30, 1, 16)])
def test_layers_in_one_compute_what_mlx_lm_s_do(
    model: LanguageModel, variant: str, chunks: tuple[int, ...]
) -> None:
    """A prompt, steps, and prompts behind steps agree within rounding with the layers one after another."""
    expected = _in_chunks(tiny_loaded(variant).model, chunks)
    assert mx.allclose(_in_chunks(model, chunks), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunks", [(1,) * 90, (40, 1, 1, 1, 30, 1, 16), (7, 83)])
def test_a_text_has_the_same_bits_however_it_is_cut(
    model: LanguageModel, chunks: tuple[int, ...]
) -> None:
    """Logits of each position, computed at once and in chunks."""
    assert mx.array_equal(_in_chunks(model, chunks), _in_chunks(model, (90,)))


_JOINS = st.builds(
    lambda length, seed, tokens, at_step, chunk_tokens, lane: Join(
        random_prompt(length, seed),
        tokens,
        SamplingParams(temperature=0, top_logprobs=2),
        at_step,
        chunk_tokens,
        lane=lane,
    ),
    length=st.integers(1, 60),
    seed=st.integers(0, 3),
    tokens=st.integers(1, 20),
    at_step=st.integers(0, 6),
    chunk_tokens=st.integers(1, 60),
    lane=st.sampled_from([Lane.BATCH, Lane.BATCH, Lane.SERIAL]),
)


@settings(max_examples=15)
@given(rows=st.lists(_JOINS, min_size=2, max_size=8), threads=st.integers(1, 3))
def test_a_row_has_the_same_bits_alone_and_in_company(
    engine: MlxEngine, rows: list[Join], threads: int
) -> None:
    """Whatever joins and leaves, however prompts are cut, in which lane, on how many threads."""
    assert_same_bits_alone(engine, rows, threads)


def test_other_bits_are_noticed(engine: MlxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With mlx-lm's layers for batches, rows have other last bits there."""
    sampling = SamplingParams(temperature=0, top_logprobs=2)
    rows = [Join(random_prompt(length, length), 12, sampling) for length in (9, 20, 33, 50)]
    right = said(engine, rows)
    assert right == [said(engine, [row])[0] for row in rows]
    monkeypatch.setattr(LayersInOne, "take", staticmethod(lambda _: False))
    assert right != said(engine, rows)


def test_a_layer_that_is_not_the_kernels_leaves_all_to_mlx_lm(variant: str) -> None:
    """One with a bias, and one whose weights the kernels do not compute."""
    for name in ("o_proj", "q_proj"):
        model = tiny_loaded(variant).model
        layer = model.layers[1].self_attn[name]
        layer.bias = mx.zeros((layer.weight.shape[0],))
        kind = type(model.model)
        compute_layers_in_one(model)
        assert type(model.model) is kind


def test_layers_whose_rotations_have_no_table_are_computed_one_by_one() -> None:
    """A llama that rotates neighbours by scaled frequencies is served, and says what it says by itself."""
    loaded = tiny_loaded("llama+llama3_rope")
    for layer in loaded.model.layers:
        layer.self_attn.rope.traditional = True
    expected = _in_chunks(loaded.model, [90])
    engine = make_engine(loaded, max_rows=2)
    try:
        assert mx.allclose(_in_chunks(loaded.model, [90]), expected, atol=1e-3)
    finally:
        engine.close()
