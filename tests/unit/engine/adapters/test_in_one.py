"""Adapters within the operation of all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest
from support.engines.adapted_rows import NARROW, WIDE, mixed_rows, without_adapters
from support.engines.adapters import TinyBase, adapted_engine
from support.engines.same_bits import assert_same_bits_alone, said

from machd.engine.adapters.low_rank import AdapterWeights
from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Cache
from machd.engine.kernels.layers_in_one import LayersInOne
from machd.engine.kernels.pass_adapters import AdapterKey, AdapterPass, current_adapters
from machd.engine.step.mlx_engine import MlxEngine
from machd.errors import AdapterError
from machd_probes.merged_adapters import random_adapter
from machd_probes.play import play

pytestmark = pytest.mark.skipif(
    native_kernels() is None, reason="make setup has found no compiler: mlx computes"
)

_BASES = {name: TinyBase(name) for name in ("qwen3", "gemma3_text")}


@pytest.fixture(name="engine", scope="module", params=[*_BASES, "quantised"])
def _engine(request: pytest.FixtureRequest) -> Iterator[MlxEngine]:
    base = _BASES.get(request.param, TinyBase("qwen3", is_quantised=True))
    _, model = adapted_engine(base.loaded())
    adapters: dict[AdapterKey, list[AdapterWeights]] = {
        (NARROW,): [random_adapter(model.base, rank=4, seed=1, scale=1.5, has_magnitudes=True)],
        (WIDE,): [random_adapter(model.base, rank=7, seed=2, scale=0.5)],
    }
    engine, _ = adapted_engine(base.loaded(), adapters)
    yield engine
    engine.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [1 << 20, 7])
def test_rows_with_adapters_have_the_same_bits_alone(
    engine: MlxEngine, chunk_tokens: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one operation every time: rows of an adapter with magnitudes, of one without and of none, in steps and in prompts beside them."""
    passes = list[AdapterPass | None]()
    computed = LayersInOne.__call__

    def counted(self: LayersInOne, x: mx.array, caches: Sequence[Cache]) -> mx.array:
        adapters = current_adapters()
        passes.append(None if adapters is None else adapters.in_one)
        return computed(self, x, caches)

    monkeypatch.setattr(LayersInOne, "__call__", counted)
    assert_same_bits_alone(engine, mixed_rows(chunk_tokens), threads)
    assert any(passes), "with adapters"


def test_every_pass_with_adapters_is_one_operation(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows of an adapter with magnitudes, too."""
    taken, take = list[bool](), LayersInOne.take

    def counted(self: LayersInOne, caches: Sequence[Cache]) -> bool:
        taken.append(take(self, caches))
        return taken[-1]

    monkeypatch.setattr(LayersInOne, "take", counted)
    play(engine, mixed_rows())
    assert taken
    assert all(taken)


@pytest.mark.parametrize("low_rank", [None, object], ids=["before adapters", "before magnitudes"])
def test_kernels_older_than_machd_refuse_adapters_and_compute_the_base(
    low_rank: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to install; nothing is left in memory, and rows of the base have their bits."""
    engine, model = adapted_engine(_BASES["qwen3"].loaded())
    rows = [without_adapters(row) for row in mixed_rows()]
    expected = said(engine, rows)
    if low_rank is None:
        monkeypatch.delattr(native_kernels(), "LowRank")
    else:
        monkeypatch.setattr(native_kernels(), "LowRank", low_rank)

    with pytest.raises(AdapterError, match=r"older than machd.*scripts/native"):
        model.add((NARROW,), [random_adapter(model.base, rank=4, seed=1, scale=1.5)])

    assert model.nbytes == 0
    assert said(engine, rows) == expected
    engine.close()
