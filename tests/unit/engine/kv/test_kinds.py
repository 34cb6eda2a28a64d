"""What a kind of cache can do is what the rules say of its class, and a class without a kind is mlx-lm's to batch."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import mlx.core as mx
import pytest

from machd.capabilities.batching_rules import batched_specdec, continuous_batching
from machd.capabilities.facts import CacheFacts, LayerCacheFacts
from machd.capabilities.rules import PrefixExtent, kv_quantization, prefix_cache, speculation
from machd.capabilities.verdict import Support
from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.formats import kv_format_named
from machd.engine.kv.lane_kv import JoiningRow, PrefilledRow
from machd.engine.kv.layers.kinds import kind_of

from mlx_lm.models.cache import (  # isort: skip - after the engine
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)


@pytest.mark.parametrize(
    "make",
    [
        KVCache,
        lambda: RotatingKVCache(max_size=8),
        lambda: ArraysCache(2),
        lambda: ChunkedKVCache(8),
    ],
    ids=["standard", "window", "state", "chunks"],
)
def test_rules_allow_what_the_kind_can_do(make: Callable[[], Any]) -> None:
    """Batches, rollback, blocks and formats are blocked by the rules if the class cannot do them, and only then."""
    cache = make()
    kind = kind_of(cache)
    window = getattr(cache, "max_size", None)
    facts = CacheFacts((LayerCacheFacts(type(cache).__name__, window_tokens=window),), 1, 1)

    assert _is_allowed(continuous_batching(facts).support) is kind.can_batch(cache)
    assert _is_allowed(speculation(facts).support) is (kind.max_rolled_back_rows > 0)
    assert _is_allowed(batched_specdec(facts).support) is (kind.max_rolled_back_rows == inf)
    assert (prefix_cache(facts).extent is PrefixExtent.FULL) is kind.has_columns
    is_coded = kind.in_format(cache, kv_format_named("affine8")) is not cache
    assert _is_allowed(kv_quantization(facts).support) is is_coded


class _PrivateCache(ArraysCache):  # type: ignore[misc] # mlx-lm has no types
    """A model's own subclass of a known cache."""


def test_any_other_class_is_batched_by_mlx_lm() -> None:
    """Rows join and leave in the cache that mlx-lm merges, which is told of padding; there is no way back."""
    batch = BatchLaneKv(3)
    for name in (1.0, 2.0, 3.0):
        cache = _PrivateCache(1)
        cache[0] = mx.full((1, 4), name)
        batch.join(PrefilledRow([cache], 0, 9, 1))
    (merged,) = batch.caches
    assert isinstance(merged, _PrivateCache)
    batch.select([2, 0])
    assert merged[0][:, 0].tolist() == [3.0, 1.0]
    batch.begin_pass([2, 1])
    assert merged.make_mask(2).tolist() == [[True, True], [True, False]]
    batch.end_pass()
    assert merged.make_mask(2) is None
    assert not batch.can_roll_back
    assert batch.growth_bytes([JoiningRow(1, 9)], 1, 0) == merged.nbytes


def _is_allowed(support: Support) -> bool:
    return support is not Support.BLOCKED
