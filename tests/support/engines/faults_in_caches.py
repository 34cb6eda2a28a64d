"""Faults to plant in what the rows of a batch remember: masks, positions, places and states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kernels.layers_in_one import LayersInOne
from machd.engine.kv import model_kv, row_caches
from machd.engine.kv.batch_lane import BatchLaneKv
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.kv.layers import slab
from machd.engine.kv.layers.batched_cache import PositionedKv
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.layers.state import StateKv
from machd.engine.kv.layers.window import WindowKv
from machd.engine.kv.quantized_cache import QuantizedCache
from machd.engine.kv.row_positions import RowPositions, SlabRows
from machd.engine.kv.slab_layout import Layout
from machd.engine.protocol.step import SharedPrefix
from support.engines.small_classes import small_classes

from mlx_lm.models.cache import (  # isort: skip - after the engine
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

Plant = Callable[[pytest.MonkeyPatch], None]


def what_lies_behind_a_row_is_seen(patch: pytest.MonkeyPatch) -> None:
    """Decoding rows see all columns, those that longer rows need and those that others left."""
    right = RowPositions.mask

    def mask(self: RowPositions, window_tokens: int | None) -> mx.array:
        seen = right(self, window_tokens)
        return mx.ones_like(seen) if self.tokens == 1 else seen

    patch.setattr(RowPositions, "mask", mask)


def what_lies_in_front_of_a_row_is_seen(patch: pytest.MonkeyPatch) -> None:
    """Rows with windows see the columns that hold no position of theirs yet."""
    right = WindowKv.make_mask

    def make_mask(self: WindowKv, count: int, *args: Any, **kwargs: Any) -> mx.array:
        mask = right(self, count, *args, **kwargs)
        held = self._held(self._positions.start + count, mask.shape[-1])
        return mask | (held < 0)[:, None, None]

    patch.setattr(WindowKv, "make_mask", make_mask)


def one_window_for_all(patch: pytest.MonkeyPatch) -> None:
    """Every row sees as much of its window as the row in the first place."""
    right = WindowKv.make_mask

    def make_mask(self: WindowKv, *args: Any, **kwargs: Any) -> mx.array:
        mask = right(self, *args, **kwargs)
        return mx.broadcast_to(mask[:1], mask.shape)

    patch.setattr(WindowKv, "make_mask", make_mask)


def windows_are_a_token_short(patch: pytest.MonkeyPatch) -> None:
    """Decoding rows do not see the oldest token of their windows."""
    rotating, own = WindowKv.make_mask, RowPositions.mask

    def make_mask(
        self: WindowKv, count: int, window_size: int | None = None, **kwargs: Any
    ) -> mx.array:
        window_tokens = (window_size or self.max_size) - 1
        return rotating(self, count, window_size=window_tokens, **kwargs)

    def mask(self: RowPositions, window_tokens: int | None) -> mx.array:
        return own(self, None if window_tokens is None else window_tokens - 1)

    patch.setattr(WindowKv, "make_mask", make_mask)
    patch.setattr(RowPositions, "mask", mask)


def windows_are_taken_for_whole_texts(patch: pytest.MonkeyPatch) -> None:
    """Merged llama layers believe that each row sees all it has, whatever the mask says."""
    patch.setattr(SlabKv, "sees_all", lambda *_: True)


def sinks_are_kept(patch: pytest.MonkeyPatch) -> None:
    """Rotating caches hold their first four tokens for good, which no batch cache does."""
    right = RotatingKVCache.__init__
    patch.setattr(
        RotatingKVCache, "__init__", lambda self, max_size, **_: right(self, max_size, keep=4)
    )


def positions_are_the_longest_rows(patch: pytest.MonkeyPatch) -> None:
    """Every row is told the position of the longest."""
    _rows_are_told(patch, lambda offsets: mx.broadcast_to(mx.max(offsets), offsets.shape))


def _rows_are_told(patch: pytest.MonkeyPatch, wrong: Callable[[mx.array], mx.array]) -> None:
    def told(own: property) -> property:
        return property(lambda cache: wrong(own.__get__(cache)))

    for kind in (SlabKv, WindowKv):
        patch.setattr(kind, "offset", told(vars(PositionedKv)["offset"]))


def late_rows_are_a_position_ahead(patch: pytest.MonkeyPatch) -> None:
    """Rows that join others are told, once they decode, the position behind their own."""
    append, select = RowPositions.append, RowPositions.select

    def late(positions: RowPositions) -> list[int]:
        ahead: list[int] = vars(positions).setdefault("late", [])
        return ahead

    def late_append(
        self: RowPositions, length: int, limit: int, shared: SharedPrefix | None = None
    ) -> None:
        late(self).append(int(bool(self.lengths)))
        append(self, length, limit, shared)

    def late_select(self: RowPositions, order: list[int]) -> None:
        late(self)[:] = [late(self)[row] for row in order]
        select(self, order)

    def told(own: property) -> property:
        def offset(cache: SlabKv | WindowKv) -> mx.array:
            offsets: mx.array = own.__get__(cache)
            positions = cache._positions
            return offsets + mx.array(late(positions)) if positions.tokens == 1 else offsets

        return property(offset)

    patch.setattr(RowPositions, "append", late_append)
    patch.setattr(RowPositions, "select", late_select)
    for kind in (SlabKv, WindowKv):
        patch.setattr(kind, "offset", told(vars(PositionedKv)["offset"]))


def a_neighbours_place_is_written(patch: pytest.MonkeyPatch) -> None:
    """A step's keys and values go to the row in the next place."""
    write, write_window = SlabKv._write_rows, WindowKv._write

    def rolled_write(self: SlabKv, array: mx.array, new: mx.array, rows: SlabRows) -> mx.array:
        return write(self, array, mx.roll(new, 1, 0) if new.shape[2] == 1 else new, rows)

    def rolled_window(self: WindowKv, array: mx.array, new: mx.array) -> None:
        write_window(self, array, mx.roll(new, 1, 0) if new.shape[2] == 1 else new)

    patch.setattr(SlabKv, "_write_rows", rolled_write)
    patch.setattr(WindowKv, "_write", rolled_window)


def one_operation_has_the_longest_rows_starts(patch: pytest.MonkeyPatch) -> None:
    """Layers that are one operation compute every row as if it were as long as the longest: they ask for no mask and no offset."""
    right = LayersInOne._seen

    def seen(self: LayersInOne, rows: Any) -> object:
        longest = mx.broadcast_to(mx.max(rows.starts), rows.starts.shape)
        return right(self, rows._replace(starts=longest))

    patch.setattr(LayersInOne, "_seen", seen)


def one_operation_writes_a_neighbours_place(patch: pytest.MonkeyPatch) -> None:
    """The keys and values that such layers write for a row are kept for the row in the next place."""
    right = LayersInOne._slabs

    def slabs(self: LayersInOne, cache: SlabKv | WindowKv) -> Any:
        return [(rows, held._replace(keep=_rolled(held.keep))) for rows, held in right(self, cache)]

    patch.setattr(LayersInOne, "_slabs", slabs)


def _rolled(keep: Callable[[mx.array, mx.array], None]) -> Callable[[mx.array, mx.array], None]:
    return lambda keys, values: keep(mx.roll(keys, 1, 0), mx.roll(values, 1, 0))


def the_wrong_row_moves(patch: pytest.MonkeyPatch) -> None:
    """Into the place of a row that left goes what the one before the last holds."""
    moving = SlabKv._moving

    def move(self: SlabKv, before: Layout, after: Layout) -> Any:
        shifted = (replace(one, rows=(*one.rows[1:], one.rows[0])) for one in before)
        return moving(self, tuple(shifted), after)

    _others_select(
        patch, lambda order: [old if old == place else old - 1 for place, old in enumerate(order)]
    )
    patch.setattr(SlabKv, "_moving", move)


def a_lists_states_are_in_reverse(patch: pytest.MonkeyPatch) -> None:
    """When rows leave, of a list of caches those with a state keep it in reverse order."""
    _others_select(patch, lambda order: order[::-1])


def _others_select(
    patch: pytest.MonkeyPatch, wrong: Callable[[Sequence[int]], Sequence[int]]
) -> None:
    """Caches without columns keep rows of another order."""

    def select(right: Callable[[Any, Sequence[int]], None]) -> Callable[[Any, Sequence[int]], None]:
        return lambda self, order: right(self, wrong(order))

    for kind in (WindowKv, StateKv):
        patch.setattr(kind, "select", select(kind.select))


def a_former_rows_token_stays(patch: pytest.MonkeyPatch) -> None:
    """The first position of a place that is taken again is the former row's."""
    right = slab._take

    def take(
        arrays: Sequence[mx.array], place: int, row: Sequence[mx.array], *, is_blank: bool
    ) -> None:
        held = mx.array(arrays[0][place : place + 1, :, :1])
        right(arrays, place, row, is_blank=is_blank)
        if not is_blank:
            arrays[0][place : place + 1, :, :1] = held

    patch.setattr(slab, "_take", take)


def the_last_column_is_lost_when_rows_move(patch: pytest.MonkeyPatch) -> None:
    """When a row's slab becomes another one, what its last column held is not copied."""
    _columns_are_lost(patch, lambda _: True)


def the_last_quantized_column_is_lost_when_rows_move(patch: pytest.MonkeyPatch) -> None:
    """The same in 8 bits alone: the last column gets neither words nor scales."""
    _columns_are_lost(patch, lambda cache: cache.kv_format is not PLAIN)


def _columns_are_lost(patch: pytest.MonkeyPatch, is_affected: Callable[[SlabKv], bool]) -> None:
    small_classes(patch)  # or the probes' short rows would never move
    follow, filled = SlabKv._follow, RowPositions.filled

    def short_follow(self: SlabKv, arriving: Any) -> None:
        before = {row_id: one.number for one in self._layout for row_id in one.rows}
        follow(self, arriving)
        if not (self._slabs and is_affected(self)):
            return
        for one, arrays in zip(self._layout, self._slabs, strict=True):
            for place, row_id in enumerate(one.rows):
                last = filled(self._positions, row_id) - 1
                if last >= 0 and before.get(row_id, one.number) != one.number:
                    for array in arrays:
                        array[place : place + 1, :, last : last + 1] = 0

    patch.setattr(SlabKv, "_follow", short_follow)


def two_rows_exchange_their_states(patch: pytest.MonkeyPatch) -> None:
    """When a row leaves, the first two others get one another's state."""
    right = StateKv.select
    patch.setattr(StateKv, "select", lambda self, order: right(self, [*order[1::-1], *order[2:]]))


def a_new_row_begins_in_an_old_state(patch: pytest.MonkeyPatch) -> None:
    """A prompt's states begin as those of the last prompt ended."""
    right = row_caches.make_row_caches
    former: list[Cache] = []

    def make_row_caches(model: LanguageModel, kv_format: KvFormat) -> list[Cache]:
        caches = right(model, kv_format)
        for cache, old in zip(_states(caches), _states(former), strict=False):
            cache.cache = list(old.cache)
        former[:] = caches
        return caches

    patch.setattr(model_kv, "make_row_caches", make_row_caches)


def _states(caches: list[Cache]) -> list[Cache]:
    opened: list[Cache] = []
    for cache in caches:
        if isinstance(cache, CacheList):
            opened += _states(list(cache.caches))
        elif isinstance(cache, ArraysCache):
            opened.append(cache)
    return opened


def a_trim_is_a_token_short(patch: pytest.MonkeyPatch) -> None:
    """A cache that is cut back keeps one token too many."""
    right = KVCache.trim
    patch.setattr(KVCache, "trim", lambda self, count: right(self, count - 1))


def scales_are_dropped(patch: pytest.MonkeyPatch) -> None:
    """Keys and values in 8 bits are read as if all groups had one scale."""
    right = QuantizedCache.keys_and_values

    def keys_and_values(self: QuantizedCache) -> tuple[mx.array, mx.array]:
        arrays = self.arrays
        # Words and parameters in turn.
        self.arrays = [
            mx.ones_like(array) if number % 2 else array for number, array in enumerate(arrays)
        ]
        read = right(self)
        self.arrays = arrays
        return read

    patch.setattr(QuantizedCache, "keys_and_values", keys_and_values)


def joining_rows_lose_their_last_scales(patch: pytest.MonkeyPatch) -> None:
    """A row that joins a batch in 8 bits gets its last token's words without their scales."""
    right = SlabKv.place

    def place(self: SlabKv, row: int, arrays: Sequence[mx.array]) -> None:
        if self.kv_format is not PLAIN:
            arrays = [_without_last(array) if n % 2 else array for n, array in enumerate(arrays)]
        right(self, row, arrays)

    patch.setattr(SlabKv, "place", place)


def _without_last(array: mx.array) -> mx.array:
    return mx.concatenate([array[:, :, :-1], mx.zeros_like(array[:, :, -1:])], axis=2)


def scales_are_the_next_rows(patch: pytest.MonkeyPatch) -> None:
    """A step's scales in 8 bits are written to the row in the next place, its words to its own."""
    right = SlabKv._write_rows

    def write(self: SlabKv, array: mx.array, new: mx.array, rows: SlabRows) -> mx.array:
        is_scales = self.kv_format is not PLAIN and new.dtype != mx.uint32
        return right(self, array, mx.roll(new, 1, 0) if is_scales else new, rows)

    patch.setattr(SlabKv, "_write_rows", write)


def a_left_batch_is_not_dropped(patch: pytest.MonkeyPatch) -> None:
    """When the last row leaves, its caches stay."""
    patch.setattr(BatchLaneKv, "clear", lambda _: None)
