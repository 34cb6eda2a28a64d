"""Keys and values of a whole batch in a few arrays a layer, each row from its own column 0.

A row's token at position ``p`` lies in column ``p`` of the row. Nothing is shifted when a row joins or
leaves, masks and windows are those of the row alone, and a pass writes one column a row and token. Columns
after a row's end hold what was there before, and are masked out.

Where rows lie is planned for all layers by :mod:`machd.engine.kv.slab_layout`. A layer follows the plan when
a row joins or leaves, and otherwise when it is next written: it copies the rows that have moved, and whole
slabs only where there are places to add.

Rows may share a prefix: one array pair that all of them read. Such a row's column 0 is the position behind
the prefix, which is kept as long as a row shares it and never written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import ClassVar, Self

import mlx.core as mx

from machd.engine.backend.native_kernels import native_kernels
from machd.engine.backend.untyped import Cache
from machd.engine.kv.kv_format import PLAIN, KvFormat, KvWidths, UnpackedKv
from machd.engine.kv.layers.batched_cache import Checkpoint, PositionedKv
from machd.engine.kv.quantized_cache import FormatCache, QuantizedCache, format_of
from machd.engine.kv.row_positions import RowPositions, SlabRows
from machd.engine.kv.slab_layout import Layout, Slab
from machd.engine.protocol.slab_size import COLUMN_STEP

_SLICED_COST = 3
"""Cost on the CPU of converting a column of a slice to floats, over that of a column of the whole array."""

_Arriving = Mapping[int, Sequence[mx.array]]
"""Arrays [1, heads, length, n] of rows that join or move, by row id."""

_NONE: _Arriving = MappingProxyType({})


class SlabKv(FormatCache, PositionedKv):
    """One layer's keys and values, with the methods that mlx-lm's models expect of a cache.

    A row comes from mlx-lm's ``KVCache``, or in a quantized format from a :class:`QuantizedCache`.
    """

    has_columns: ClassVar[bool] = True
    max_rolled_back_rows: ClassVar[float] = inf

    def __init__(self, positions: RowPositions, kv_format: KvFormat = PLAIN) -> None:
        super().__init__(kv_format)
        self._positions = positions
        self._layout: Layout = ()
        self._slabs: list[list[mx.array]] = []
        self._prefixes: dict[int, Sequence[mx.array]] = {}

    @classmethod
    def of(cls, cache: Cache, positions: RowPositions, max_rows: int) -> Self:
        """Begin without rows, in the format of a row's cache."""
        del max_rows
        return cls(positions, format_of(cache))

    @staticmethod
    def in_format(cache: Cache, kv_format: KvFormat) -> Cache:
        """Return an empty cache of one row in a KV format."""
        return cache if kv_format is PLAIN else QuantizedCache(kv_format)

    @staticmethod
    def make_room(cache: Cache, tokens: int) -> None:
        """Have the cache's next growth make room for ``tokens`` tokens; a quantized cache grows as needed anyway."""
        if not isinstance(cache, FormatCache):
            cache.step = -(-tokens // COLUMN_STEP) * COLUMN_STEP

    @staticmethod
    def row_columns(cache: Cache, row: int, begin: int) -> tuple[mx.array, ...]:
        """Return a row's arrays; see :class:`PositionedKv`."""
        if isinstance(cache, FormatCache):
            return cache.row_arrays(row, begin)
        held = () if cache.keys is None else (cache.keys, cache.values)
        return tuple(array[row : row + 1, :, begin:] for array in held)

    @staticmethod
    def fill_columns(cache: Cache, arrays: Sequence[mx.array], length: int) -> None:
        """Put positions into an empty cache of one row; see :class:`PositionedKv`."""
        if isinstance(cache, QuantizedCache):
            cache.arrays = list(arrays)
        elif arrays:
            cache.keys, cache.values = arrays
        cache.offset = length

    @staticmethod
    def row_checkpoint(cache: Cache) -> Checkpoint:
        """Make a checkpoint of a row's cache: its length."""
        return ColumnCheckpoint(cache)

    @property
    def arrays(self) -> list[mx.array]:
        """The arrays of the only slab; none before the first write."""
        assert len(self._slabs) < 2, "rows in several slabs have no array in common"
        return self._slabs[0] if self._slabs else []

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The arrays that a forward pass has to compute."""
        held = [*self._slabs, *self._prefixes.values()]
        return tuple(array for arrays in held for array in arrays)

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self._positions.lengths)

    @property
    def is_plain(self) -> bool:
        """True if keys and values are stored as they are."""
        return self.kv_format is PLAIN

    def empty(self) -> bool:
        """Return True before the first write."""
        return not self._slabs

    def size(self) -> int:
        """Return the positions of the longest row."""
        return max(self._positions.lengths, default=0)

    def make_mask(
        self,
        N: int,  # noqa: N803 - mlx-lm's name, and models may use it
        return_array: bool = False,  # noqa: FBT001, FBT002 - mlx-lm's signature
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """Make the mask of the running pass, or mlx-lm's name for it where rows are equally long."""
        positions = self._positions
        assert positions.tokens == N, "the pass was opened for so many tokens"
        if positions.common_start is not None and window_size is None and not return_array:
            return None if N == 1 else "causal"
        return positions.mask(window_size)

    def sees_all(self, mask: mx.array | str | None) -> bool:
        """Return True if a mask of :meth:`make_mask` lets each token see all its row's positions so far."""
        return not isinstance(mask, mx.array) or mask is self._positions.mask(None)

    def window_of(self, mask: mx.array | str | None) -> int | None:
        """Return the window of a mask of :meth:`make_mask`, 0 for all positions so far; None for another mask."""
        return 0 if self.sees_all(mask) else self._positions.window_of(mask)

    @property
    def starts(self) -> mx.array:
        """Columns of each row before the running pass, int32 [rows]."""
        return self._positions.start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the pass's tokens [rows, heads, tokens, n] and read [rows, heads, width, n], all columns that any row may see.

        Only under OneSlab; with length classes the kernels use :meth:`write` and :meth:`by_slab`.
        """
        self.write(keys, values)
        return self.keys_and_values()

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Write the pass's tokens; see :meth:`update_and_fetch`."""
        new = self.kv_format.encode(keys, values)
        self._follow(_NONE)
        if not self._slabs:
            self._slabs = [_blank(slab, new) for slab in self._layout]
        for rows, arrays in zip(self._positions.by_slab(), self._slabs, strict=True):
            for at, one in enumerate(new):
                if one.size:
                    arrays[at] = self._write_rows(arrays[at], rows.of(one), rows)
        self._widths = KvWidths.of(keys, values)
        self._written_pass = self._positions.pass_number

    def takes_columns(self) -> bool:
        """Return True if :meth:`slabs_to_write` has keys and values as they are."""
        return self.is_plain

    def slabs_to_write(self, kv_shape: tuple[int, int]) -> list[tuple[SlabRows, list[mx.array]]]:
        """Return the rows of each slab and its arrays, which the caller replaces by those with the pass's tokens.

        Args:
            kv_shape: Heads of keys and their numbers, of arrays in float32 that are still to be made.
        """
        self._follow(_NONE)
        if not self._slabs:
            heads, head_dim = kv_shape
            self._slabs = [
                _blank(slab, [mx.zeros((1, heads, 1, head_dim))] * 2) for slab in self._layout
            ]
        self._widths = self._widths or KvWidths.of(*self._slabs[0])
        self._written_pass = self._positions.pass_number
        return self.by_slab()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Read all columns that any row may see; see :meth:`update_and_fetch`."""
        return self.decoded(0, self.rows, self._positions.width)

    def by_slab(self) -> list[tuple[SlabRows, list[mx.array]]]:
        """Return the rows of each slab in the running pass, and its arrays [places, heads, columns, n]."""
        return list(zip(self._positions.by_slab(), self._slabs, strict=True))

    def in_row_order(self, parts: Sequence[mx.array]) -> mx.array:
        """Join the parts of an array with all rows, one of each slab, in the batch's order."""
        return self._positions.in_row_order(parts)

    def decoded_rows(self, rows: SlabRows, arrays: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Decode the rows of a slab up to the end of the longest: [rows, heads, width, head_dim] each."""
        seen = [array[: rows.rows, :, : rows.width] for array in arrays]
        return self.kv_format.decode(seen, self._known_widths)

    def unpacked(self, rows: SlabRows, arrays: Sequence[mx.array]) -> UnpackedKv | None:
        """Unpack the rows of a slab up to the end of the longest, for attention without dequantising.

        The parts cover more columns where those cost less than a slice.
        """
        places, _, columns, _ = arrays[0].shape
        seen = columns if columns <= rows.width * _SLICED_COST else rows.width
        if (rows.rows, seen) != (places, columns):
            arrays = [array[: rows.rows, :, :seen] for array in arrays]
        return self.kv_format.unpack(arrays, self._known_widths, rows.width)

    def row_arrays(self, row: int, begin: int = 0) -> tuple[mx.array, ...]:
        """Return a row's arrays from a position on, its shared prefix included; see :class:`FormatCache`."""
        arrays, place = self._place_of(row)
        base, shared = self._positions.base(row), self._positions.shared[row]
        own = tuple(array[place : place + 1, :, max(0, begin - base) :] for array in arrays)
        if shared is None or begin >= base:
            return own
        before = [array[:, :, begin:] for array in self._prefixes[shared.number]]
        return tuple(mx.concatenate([*pair], axis=2) for pair in zip(before, own, strict=True))

    def prefix(self, rows: SlabRows) -> Sequence[mx.array] | None:
        """Return the arrays [1, heads, tokens, n] of the prefix that a slab's rows share; None where they do not."""
        return None if rows.prefix is None else self._prefixes[rows.prefix]

    def hold_prefix(self, number: int, arrays: Sequence[mx.array]) -> None:
        """Keep a prefix [1, heads, tokens, n] as long as a row shares it."""
        self._prefixes[number] = arrays

    def join(self, cache: Cache, index: int) -> None:
        """Copy in the batch's last row; see :class:`PositionedKv`."""
        row = self.rows - 1
        base, length = self._positions.base(row), self._positions.lengths[row]
        # Without positions there need not be arrays yet, and a layer may never have any.
        held = self.row_columns(cache, index, base) if length else ()
        self.place(row, [array[:, :, : length - base] for array in held])

    def place(self, row: int, arrays: Sequence[mx.array]) -> None:
        """Copy a row in, after all others: its own columns [1, heads, length, n] each; none without any."""
        self._follow({self._positions.row_ids[row]: arrays} if arrays else _NONE)

    def select(self, order: Sequence[int]) -> None:
        """Keep the rows that the batch's positions have kept; a row is copied only if it changes its place."""
        del order
        held_bytes = self.nbytes
        read = {shared.number for shared in self._positions.shared if shared is not None}
        self._prefixes = {number: one for number, one in self._prefixes.items() if number in read}
        self._follow(_NONE)
        if self.nbytes < held_bytes:
            mx.eval(self.state)  # frees the old arrays

    def wipe(self, row: int, begin: int = 0) -> None:
        """Zero a row's own columns from a position on: a NaN reaches later tokens, as 0 x NaN is NaN.

        A shared prefix stays: it has no NaN, and other rows read it.
        """
        arrays, place = self._place_of(row)
        begin = max(0, begin - self._positions.base(row))
        for array in arrays:
            if begin < array.shape[2]:
                array[place : place + 1, :, begin:] = 0

    def _place_of(self, row: int) -> tuple[Sequence[mx.array], int]:
        """Return the arrays of a row's slab, none before the first write, and its place there."""
        row_id = self._positions.row_ids[row]
        for slab, arrays in zip(self._layout, self._slabs, strict=bool(self._slabs)):
            if row_id in slab.rows:
                return arrays, slab.rows.index(row_id)
        return (), 0

    def _write_rows(self, array: mx.array, new: mx.array, rows: SlabRows) -> mx.array:
        """Write a pass's tokens, in place; a shorter row's padding lands after its end, where its next tokens will overwrite it."""
        native = native_kernels()
        start, tokens = rows.common_start, new.shape[2]
        if native is not None:
            written: mx.array = native.written(array, new, rows.start)
            return written
        if start is not None:
            array[: rows.rows, :, start : start + tokens] = new
        elif tokens == 1:
            array[rows.places, :, rows.start] = new[:, :, 0]  # [rows, heads, n]
        else:
            columns = rows.start[:, None] + mx.arange(tokens, dtype=mx.int32)  # [rows, tokens]
            array[rows.places[:, None], :, columns] = new.transpose(0, 2, 1, 3)
        return array

    def _follow(self, arriving: _Arriving) -> None:
        """Lay the arrays out in the batch's current layout.

        First :meth:`_moving` copies the rows that change their place. Then :meth:`_laid_out` makes each slab from the arrays
        of :func:`_origin`, in which the rows of :func:`_staying` stay, and :func:`_take` puts the others in.
        """
        before, after = self._layout, self._positions.layout
        self._layout = after
        if before is after or not (self._slabs or arriving):
            return
        like = self._slabs[0] if self._slabs else next(iter(arriving.values()))
        held = {
            slab.number: (slab, arrays)
            for slab, arrays in zip(before, self._slabs, strict=bool(self._slabs))
        }
        copies = {**self._moving(before, after), **arriving}
        self._slabs = [self._laid_out(slab, held, copies, like) for slab in after]

    def _moving(self, before: Layout, after: Layout) -> _Arriving:
        """Copy the rows that leave their place, before anything is written there."""
        if not self._slabs:
            return {}
        stays = {
            row_id for slab in after for row_id in _staying(_origin(slab, before, after), slab)
        }
        places = {
            row_id: (arrays, place)
            for slab, arrays in zip(before, self._slabs, strict=True)
            for place, row_id in enumerate(slab.rows)
        }
        copies = {
            row_id: [
                mx.contiguous(array[place : place + 1, :, : self._positions.filled(row_id)])
                for array in arrays
            ]
            for row_id, (arrays, place) in places.items()
            if row_id not in stays and any(row_id in slab.rows for slab in after)
        }
        # Evaluated first: mlx would otherwise copy the whole slab at its write, for the pending reads.
        mx.eval(copies)
        return copies

    def _laid_out(
        self,
        slab: Slab,
        held: Mapping[int, tuple[Slab, list[mx.array]]],
        copies: _Arriving,
        like: Sequence[mx.array],
    ) -> list[mx.array]:
        """Make a slab's arrays from the old arrays and the rows that have moved."""
        origin = _origin(slab, [one for one, _ in held.values()], self._layout)
        arrays = [] if origin is None else held[origin.number][1]
        # The first place of zeros: none in old arrays, where the numbers of former rows are still there.
        blank_from = slab.places
        if origin is None or origin.shape != slab.shape:
            old, arrays = arrays, _blank(slab, like)
            blank_from = 0 if origin is None else min(len(origin.rows), slab.places)
            for array, one in zip(arrays, old, strict=bool(old)):
                columns = min(array.shape[2], one.shape[2])
                array[:blank_from, :, :columns] = one[:blank_from, :, :columns]
        stays = _staying(origin, slab)
        for place, row_id in enumerate(slab.rows):
            if row_id not in stays:
                _take(arrays, place, copies.get(row_id, ()), is_blank=place >= blank_from)
        return arrays


class ColumnCheckpoint:
    """A row's cache with a column for each position, before a pass."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        # Not the row's length: a layer without attention never writes into its cache.
        self._offset = cache.offset

    def cut(self, count: int) -> bool:
        """Drop the last positions; their columns will be overwritten."""
        self._cache.trim(count)
        return True

    def restore(self) -> None:
        """Drop all positions since the checkpoint."""
        self._cache.offset = self._offset


def _origin(slab: Slab, before: Sequence[Slab], after: Sequence[Slab]) -> Slab | None:
    """Return the old slab whose arrays a new one may take over; None for none.

    It has the same number; or its number ends with the old layout, and its rows are the new slab's first rows. From an
    old slab whose number stays, rows are copied, as other rows may take their places in the same step.
    """
    numbers = {one.number: one for one in before}
    if slab.number in numbers:
        return numbers[slab.number]
    ending = numbers.keys() - {one.number for one in after}
    for number in ending:
        rows = numbers[number].rows
        if rows and rows == slab.rows[: len(rows)]:
            return numbers[number]
    return None


def _staying(origin: Slab | None, slab: Slab) -> set[int]:
    """Return the rows that keep their places."""
    if origin is None:
        return set()
    return {old for old, new in zip(origin.rows, slab.rows, strict=False) if old == new}


def _take(
    arrays: Sequence[mx.array], place: int, row: Sequence[mx.array], *, is_blank: bool
) -> None:
    """Put a row into a place, and zeros after it, since an earlier row may have left a NaN there."""
    length = row[0].shape[2] if row else 0
    for array, one in zip(arrays, row, strict=bool(row)):
        if one.size:
            array[place : place + 1, :, :length] = one
    if not is_blank:
        for array in arrays:
            if length < array.shape[2]:
                array[place : place + 1, :, length:] = 0


def _blank(slab: Slab, like: Sequence[mx.array]) -> list[mx.array]:
    """Make the arrays of a slab, all zeros: [places, heads, columns, n] each."""
    return [
        mx.zeros((slab.places, one.shape[1], slab.columns, one.shape[3]), dtype=one.dtype)
        for one in like
    ]
