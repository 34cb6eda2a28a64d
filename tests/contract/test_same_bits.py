"""Where machd's own kernels compute a model, a row has the same bits in every company: the embedded model's first layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.same_bits import assert_same_bits_alone, said

from machd.engine.assembly import make_engine
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Cache
from machd.engine.kernels import native_attention
from machd.engine.kernels.layers_in_one import LayersInOne
from machd.engine.loading.loader import LoadedModel
from machd.engine.protocol.step import Lane
from machd.engine.step.mlx_engine import MlxEngine
from machd.request.generation import SamplingParams
from machd_probes.play import GREEDY, Join
from machd_probes.scripts import random_prompt

pytestmark = pytest.mark.skipif(
    native_kernels() is None, reason="make setup has found no compiler: mlx computes"
)

_WAYS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=1.0, seed=4, top_p=0.9, repetition_penalty=1.2),
)
_JOINS = st.builds(
    lambda length, seed, tokens, at_step, chunk_tokens, way, lane: Join(
        random_prompt(length, seed),
        tokens,
        replace(_WAYS[way], top_logprobs=2),
        at_step,
        chunk_tokens,
        lane=lane,
    ),
    length=st.integers(1, 150),
    seed=st.integers(0, 3),
    tokens=st.integers(1, 6),
    at_step=st.integers(0, 6),
    chunk_tokens=st.integers(1, 150),
    way=st.integers(0, len(_WAYS) - 1),
    lane=st.sampled_from([Lane.BATCH, Lane.BATCH, Lane.BATCH, Lane.SERIAL]),
)
"""Rows that join at any step, their prompts cut anywhere, in the batch or beside it."""


@pytest.fixture(name="engine", scope="module")
def _engine(short_model: LoadedModel) -> Iterator[MlxEngine]:
    engine = make_engine(short_model, max_rows=16)
    yield engine
    engine.close()


@pytest.mark.parametrize("max_examples", [4, pytest.param(20, marks=pytest.mark.long)])
def test_a_row_has_the_same_bits_alone_and_in_company(engine: MlxEngine, max_examples: int) -> None:
    """Whatever joins and leaves, however prompts are cut, in which lane, on how many threads."""

    @settings(max_examples=max_examples)
    @given(rows=st.lists(_JOINS, min_size=2, max_size=16), threads=st.integers(1, 3))
    def _holds(rows: list[Join], threads: int) -> None:
        assert_same_bits_alone(engine, rows, threads)

    _holds()


def test_a_text_has_the_same_bits_as_a_prompt_and_token_by_token(short_model: LoadedModel) -> None:
    """Keys, values and logits of each position, computed at once, one after another, and in chunks."""
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - after import_mlx_lm()

    make_engine(short_model).close()  # its layers are fused
    model = short_model.model
    text = mx.array([random_prompt(140, 1)])
    results = []
    for chunk in (140, 1, 64, 77):
        caches = make_prompt_cache(model)
        logits = [model(text[:, at : at + chunk], cache=caches) for at in range(0, 140, chunk)]
        kept = [array for cache in caches for array in cache.state]
        results.append([mx.concatenate(logits, axis=1), *kept])
    for other in results[1:]:
        assert all(mx.array_equal(*pair) for pair in zip(results[0], other, strict=True))


def test_other_bits_are_noticed(engine: MlxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With mlx's attention, whose order of sums depends on the width, rows in company have other last bits."""
    sampling = SamplingParams(temperature=0, top_logprobs=2)
    lengths = enumerate((9, 40, 90, 150))
    rows = [Join(random_prompt(length, length), 6, sampling, at) for at, length in lengths]
    right = said(engine, rows)
    assert right == [said(engine, [row])[0] for row in rows]
    monkeypatch.setattr(native_attention, "_takes", lambda *_: False)
    take = LayersInOne.take

    def takes_prompts_alone(layers: LayersInOne, caches: Sequence[Cache]) -> bool:
        return not getattr(caches[0], "rows", None) and take(layers, caches)

    monkeypatch.setattr(LayersInOne, "take", takes_prompts_alone)
    together = said(engine, rows)
    assert together != [said(engine, [row])[0] for row in rows]
