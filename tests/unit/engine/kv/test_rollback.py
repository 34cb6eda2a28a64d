"""A checkpoint copies nothing, later writes do not reach it, and lengths agree after a rollback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.formats import kv_format_named
from machd.engine.kv.lane_kv import PrefilledRow
from machd.engine.kv.layers import cache_state
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.quantized_cache import QuantizedCache
from machd.engine.kv.rollback import CacheCheckpoint, supports_rollback
from machd.engine.kv.row_positions import RowPositions
from machd.engine.kv.serial_lane import SerialLaneKv
from machd.engine.kv.slab_layout import LengthClasses, OneSlab

from mlx_lm.models.cache import (  # isort: skip - after the engine
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

_WINDOW = 4


def _columns(first: int, count: int) -> mx.array:
    """[1, 1, count, 2], each column its own number."""
    return mx.broadcast_to(mx.arange(first, first + count)[None, None, :, None], (1, 1, count, 2))


def _write(cache: Any, first: int, count: int) -> None:
    cache.update_and_fetch(_columns(first, count) * 1.0, _columns(first, count) * 1.0)


def _window(tokens: int) -> RotatingKVCache:
    cache = RotatingKVCache(max_size=_WINDOW)
    for token in range(tokens):
        _write(cache, token, 1)
    return cache


def _seen(cache: Any) -> list[Any]:
    """Return the window's columns in order of position, oldest first."""
    copy = RotatingKVCache(max_size=_WINDOW)
    copy.state = tuple(mx.array(one) if isinstance(one, mx.array) else one for one in cache.state)
    _write(copy, 99, 1)
    seen = mx.sort(copy.keys_and_values()[0][0, 0, :, 0]).tolist()
    assert isinstance(seen, list)
    return seen


@pytest.mark.parametrize("write", [True, False], ids=["aliased", "the same name"])
def test_checkpoint_is_safe_from_writes_in_place(
    write: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States and windows are restored exactly, unless the checkpoint shared the cache's names."""
    if not write:
        monkeypatch.setattr(cache_state, "_aliased", lambda state: state)
    state = ArraysCache(2)
    state.cache = [mx.arange(6.0), None]
    window = _window(3)
    checkpoint = CacheCheckpoint.of([state, window])

    state.cache[0][2:4] = 9.0
    state.cache[0] += 1
    state[1] = mx.ones(3)
    window.keys[...] = 7.0
    window.offset += 2
    assert checkpoint.roll_back([2], [2])

    is_back = state.cache[0].tolist() == [0, 1, 2, 3, 4, 5] and state.cache[1] is None
    assert is_back is write
    assert window.offset == 3
    assert (window.keys[0, 0, :3, 0].tolist() == [0, 1, 2]) is write


def test_checkpoint_takes_no_memory() -> None:
    """A checkpoint takes no memory before the next write."""
    state = ArraysCache(1)
    state.cache = [mx.zeros((1, 1 << 20))]
    mx.eval(state.cache)
    mx.synchronize()
    before = mx.get_active_memory()

    checkpoint = CacheCheckpoint.of([state])
    mx.eval(state.cache)

    assert mx.get_active_memory() - before < 1 << 16
    assert checkpoint.roll_back([0], [1])


@pytest.mark.parametrize("before", range(11))
@pytest.mark.parametrize("added", [2, 3, 4, 9])
def test_cut_window_equals_one_never_filled(before: int, added: int) -> None:
    """A cut window equals one that never had the columns, at every turn of the ring."""
    for count in range(added + 1):
        cache = _window(before)
        checkpoint = CacheCheckpoint.of([cache])
        _write(cache, before, added)

        assert checkpoint.roll_back([count], [added])

        end = before + added - count
        assert cache.offset == end
        for token in range(end, end + 2 * _WINDOW + 1):
            assert _seen(cache) == [*range(max(0, token - _WINDOW + 1), token), 99]
            _write(cache, token, 1)


def test_window_is_restored_when_too_few_columns_are_left() -> None:
    """A window whose ring overwrote needed columns is restored to the checkpoint."""
    cache, state = _window(9), ArraysCache(1)
    checkpoint = CacheCheckpoint.of([cache])
    for token in range(9, 12):
        _write(cache, token, 1)

    assert not checkpoint.roll_back([2], [3])

    assert cache.offset == 9
    assert _seen(cache) == [6, 7, 8, 99]
    state.cache = [mx.zeros(3)]
    assert not CacheCheckpoint.of([KVCache(), state]).roll_back([1], [2])


def test_all_caches_are_restored_if_one_cannot_be_cut() -> None:
    """All caches are restored, before and behind the one that cannot be cut."""
    state = ArraysCache(1)
    state.cache = [mx.zeros(3)]
    caches = [_window(6), KVCache(), state, QuantizedCache(kv_format_named("affine8")), _window(2)]
    standard = [caches[1], caches[3]]
    for cache in standard:
        cache.update_and_fetch(mx.ones((1, 1, 6, 64)), mx.ones((1, 1, 6, 64)))
    checkpoint = CacheCheckpoint.of(caches)
    for cache in (caches[0], caches[4]):
        _write(cache, 50, 3)
    for cache in standard:
        cache.update_and_fetch(mx.ones((1, 1, 3, 64)), mx.ones((1, 1, 3, 64)))

    assert not checkpoint.roll_back([1], [3])

    assert [cache.offset for cache in (*standard, caches[0], caches[4])] == [6, 6, 6, 2]
    assert _seen(caches[0]) == [3, 4, 5, 99]
    assert _seen(caches[4]) == [0, 1, 99]


class _PrivateCache(KVCache):  # type: ignore[misc] # mlx-lm has no types
    """A model's own subclass of a known cache."""


@pytest.mark.parametrize(
    ("make", "known"),
    [
        (KVCache, True),
        (lambda: QuantizedCache(kv_format_named("affine4")), True),
        (lambda: RotatingKVCache(max_size=8), True),
        (lambda: RotatingKVCache(max_size=8, keep=2), True),
        (lambda: ArraysCache(2), True),
        (lambda: ChunkedKVCache(8), False),
        (QuantizedKVCache, False),
        (_PrivateCache, False),
    ],
    ids=[
        "standard",
        "affine4",
        "window",
        "window with sinks",
        "state",
        "chunks",
        "mlx-lm's quantised",
        "private",
    ],
)
def test_only_known_classes_can_roll_back(make: Callable[[], Any], known: bool) -> None:  # noqa: FBT001
    """Only exact known classes can roll back, inside lists too; a subclass cannot."""
    assert supports_rollback(make()) is known
    single = SerialLaneKv()
    single.join(PrefilledRow([KVCache(), CacheList(KVCache(), make())], 0, 9, 1))

    assert single.can_roll_back is known


def test_batch_can_roll_back_if_its_rows_can_one_by_one() -> None:
    """Standard caches and recurrent state can always roll back, a window with one row."""
    batch, state, window = BatchLaneKv(4), BatchLaneKv(4), BatchLaneKv(4)
    for count in (1, 2):
        batch.join(PrefilledRow([KVCache()], 0, 9, 1))
        state.join(PrefilledRow([KVCache(), CacheList(ArraysCache(1), KVCache())], 0, 9, 1))
        window.join(PrefilledRow([KVCache(), RotatingKVCache(_WINDOW)], 0, 9, 1))
        assert batch.can_roll_back
        assert state.can_roll_back
        assert window.can_roll_back is (count == 1)
    window.select([1])

    assert window.can_roll_back
    assert not state.takes_ragged_spans


def test_state_of_several_rows_is_restored_or_kept_whole() -> None:
    """State of several rows is restored unless every row keeps all or none keeps any."""
    for counts, is_done, value in (
        ([0, 0], True, 1.0),
        ([3, 1], True, 0.0),
        ([3, 0], False, 0.0),
        ([1, 0], False, 0.0),
    ):
        state = ArraysCache(1)
        state.cache = [mx.zeros((2, 4))]
        checkpoint = CacheCheckpoint.of([state])
        state.cache = [mx.ones((2, 4))]

        assert checkpoint.roll_back(counts, [3, 1]) is is_done
        assert float(state.cache[0].sum()) == 8 * value


def test_state_is_told_of_padding_for_one_pass() -> None:
    """State gets the lengths of a ragged pass, and none in the next pass."""
    batch = BatchLaneKv(2)
    state = ArraysCache(1)
    for _ in range(2):
        batch.join(PrefilledRow([KVCache(), state], 0, 9, 1))
    state = batch.caches[1]
    batch.begin_pass([3, 1])
    assert state.make_mask(3).tolist() == [[True, True, True], [True, False, False]]
    batch.end_pass()
    assert state.make_mask(1) is None
    batch.begin_pass([2, 2])
    assert state.make_mask(2) is None, "nothing is padded"


def test_a_window_with_sinks_keeps_them() -> None:
    """A window with sinks keeps its first positions, and the ring turns behind them."""
    for before in range(10):
        for count in range(4):
            pair = [RotatingKVCache(max_size=_WINDOW, keep=1) for _ in range(2)]
            cut, plain = pair
            for cache in pair:
                for token in range(before):
                    _write(cache, token, 1)
            checkpoint = CacheCheckpoint.of([cut])
            _write(cut, before, 4)
            assert checkpoint.roll_back([count], [4])
            if count < 4:
                _write(plain, before, 4 - count)
            for token in range(20, 30):
                for cache in pair:
                    _write(cache, token, 1)
                both = [mx.sort(one.keys_and_values()[0][0, 0, :, 0]).tolist() for one in pair]
                assert both[0] == both[1]


def test_row_positions_are_cut_on_host_and_device() -> None:
    """A step after a rollback begins at each row's new end."""
    positions = RowPositions(LengthClasses())
    positions.append(5, 30)
    positions.append(9, 30)
    positions.begin_pass([4, 2])

    positions.cut([3, 0])

    assert positions.lengths == [6, 11]
    assert positions.end.tolist() == [6, 11]
    positions.begin_pass()
    assert positions.start.tolist() == [6, 11]
    assert positions.end.tolist() == [7, 12]
    assert positions.width == 12
    positions.cut([0, 1])
    positions.select([1])
    positions.begin_pass()
    assert positions.start.tolist() == [11]
    assert positions.common_start == 11


def test_wipe_zeroes_a_row_from_a_column_on() -> None:
    """Wiping keeps earlier columns and other rows, and a column behind the last is none."""
    positions = RowPositions(OneSlab(2))
    slab = SlabKv(positions)
    for _ in range(2):
        positions.append(6, 20)
        slab.place(len(positions.lengths) - 1, [mx.ones((1, 1, 6, 2))] * 2)

    slab.wipe(1, 4)
    slab.wipe(0, 500)

    for array in slab.arrays:
        assert array[0, 0, :6, 0].tolist() == [1] * 6
        assert array[1, 0, :6, 0].tolist() == [1] * 4 + [0] * 2
