"""Every lane locates its rows' keys and values behind the one protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.lane_kv import LaneKv, PrefilledRow
from machd.engine.kv.row_caches import kv_arrays
from machd.engine.kv.serial_lane import SerialLaneKv

from mlx_lm.models.cache import KVCache  # isort: skip - after the engine


def _prefilled(name: float, length: int) -> PrefilledRow:
    cache = KVCache()
    keys = mx.full((1, 2, length, 4), name)
    cache.update_and_fetch(keys, -keys)
    return PrefilledRow([cache], length, limit=64, last_token_id=1)


def _names(lane: LaneKv, lengths: Sequence[int]) -> list[float]:
    """The name that each located row's keys hold, checked to be one for all its positions."""
    names = []
    for row, length in enumerate(lengths):
        located = lane.locate(row, length)
        keys, values = kv_arrays(located.caches[0], located.index) or ()
        own = keys[0, :, : located.length]  # [heads, length, head_dim]
        assert located.is_exact
        assert mx.array_equal(values[0, :, : located.length], -own)
        assert mx.array_equal(own, mx.full(own.shape, own[0, 0, 0]))
        names.append(float(own[0, 0, 0]))
    return names


@pytest.mark.parametrize("make", [SerialLaneKv, lambda: BatchLaneKv(4)], ids=["serial", "batch"])
def test_lane_locates_the_row_that_joined(make: Callable[[], LaneKv]) -> None:
    """A joined row is found with its own keys and values, and is gone after clear."""
    lane = make()
    lane.join(_prefilled(3.0, 5))
    assert _names(lane, [5]) == [3.0]
    assert lane.nbytes > 0

    lane.clear()

    assert lane.caches == []
    assert lane.nbytes == 0


def test_batch_lane_locates_rows_after_others_left() -> None:
    """Rows that changed their places are found at the new ones."""
    lane = BatchLaneKv(4)
    for name, length in ((1.0, 3), (2.0, 9), (3.0, 6)):
        lane.join(_prefilled(name, length))
    assert _names(lane, [3, 9, 6]) == [1.0, 2.0, 3.0]

    lane.select([2, 1])

    assert _names(lane, [6, 9]) == [3.0, 2.0]
