"""Keys and values of a batch's sliding windows in two arrays a layer, each row a ring of its own columns.

A row's token at position ``p`` lies in column ``p % period`` of the row, so no row is shifted when another
one joins, leaves or goes round. Attention does not depend on the order of columns: keys are rotated before
they are written, and the mask is made of each row's own positions.

A pass of one token needs a period of as many columns as the window has positions. A pass of several tokens
overwrites columns that its first token would still see, so the period is then longer by the others. Arrays
have fewer columns as long as no row has more positions; they grow ahead of need, one layer in a pass, so that
no pass copies them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self, TypeAlias

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import JoiningRow
from machd.engine.kv.layers.batched_cache import Checkpoint, PositionedKv
from machd.engine.kv.layers.cache_state import CacheState, StateCheckpoint, copied, move_rows
from machd.engine.kv.row_positions import RowPositions, SlabRows
from machd.engine.protocol.slab_size import COLUMN_STEP

_MAX_SPARE = 2
"""Arrays are laid out anew when rows leave and the arrays exceed the other rows' needs by this factor."""

_SPAN_STEP = 32
"""Columns by whose multiples the period grows for passes of several tokens."""

_AHEAD_TOKENS = 128
"""Positions before the last column at which arrays grow: passes enough for all layers of a model."""


RowWindow: TypeAlias = "tuple[mx.array | None, mx.array | None, int, int, int, int]"
"""``state`` of mlx-lm's window of one row: keys, values, positions, sinks, size and the next column."""


class WindowKv(PositionedKv):
    """One layer's windows, with the methods that mlx-lm's models expect of a cache.

    A row comes from mlx-lm's ``RotatingKVCache`` without sinks.

    Attributes:
        max_size: Positions that a token sees, itself included; mlx-lm's name.
        keys: [places, kv_heads, columns, head_dim], rows in the batch's order; None before the first write.
        values: The same, with a head_dim of its own.
    """

    grows_early: ClassVar[bool] = True
    # Rings could roll back several rows. The rules promise one, and no probe has measured more.
    max_rolled_back_rows: ClassVar[float] = 1

    def __init__(self, positions: RowPositions, window_tokens: int, max_rows: int) -> None:
        self.max_size = window_tokens
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._positions = positions
        self._max_rows = max_rows
        self._places = self._columns = 0
        self._period = window_tokens

    @classmethod
    def of(cls, cache: Cache, positions: RowPositions, max_rows: int) -> Self:
        """Begin without rows, with the window of a row's cache."""
        return cls(positions, cache.max_size, max_rows)

    @staticmethod
    def row_state(cache: Cache, row: int) -> CacheState:
        """Copy the window of one row."""
        if isinstance(cache, WindowKv):
            return cache.window_state(row)
        assert row == 0, "mlx-lm's window is of one row"
        return copied(_whole(cache.state))

    @staticmethod
    def row_checkpoint(cache: Cache) -> Checkpoint:
        """Make a checkpoint of a row's cache."""
        return WindowCheckpoint(cache)

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The arrays that a forward pass has to compute."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    @property
    def nbytes(self) -> int:
        """Bytes held, room to spare included."""
        return sum(array.nbytes for array in self.state)

    def empty(self) -> bool:
        """Return True before the first write."""
        return self.keys is None

    def size(self) -> int:
        """Return the positions that the longest row keeps."""
        return min(max(self._positions.lengths, default=0), self.max_size)

    def make_mask(
        self,
        N: int,  # noqa: N803 - mlx-lm's name, and models may use it
        window_size: int | None = None,
        return_array: bool = False,  # noqa: FBT001, FBT002 - mlx-lm's signature
    ) -> mx.array:
        """Make the mask of the running pass, bool [rows, 1, tokens, width]."""
        del return_array  # it always is one
        assert self._positions.tokens == N, "the pass was opened for so many tokens"
        self._make_room()
        own = (self._positions.start[:, None] + mx.arange(N, dtype=mx.int32))[:, None, :, None]
        held = self._held(self._positions.start + N, self._width)[:, None, None]
        oldest = mx.maximum(own - min(window_size or self.max_size, self.max_size) + 1, 0)
        return (held >= oldest) & (held <= own)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the pass's tokens [rows, kv_heads, tokens, n] and read all columns that any row may see, in any order."""
        self._make_room()
        if self.keys is None:
            self.keys, self.values = self._blank(keys), self._blank(values)
        assert self.values is not None, "there are both or none"
        self._write(self.keys, keys)
        self._write(self.values, values)
        self._written_pass = self._positions.pass_number
        return self.keys_and_values()

    def ring_to_write(
        self, kv_shape: tuple[int, int]
    ) -> tuple[SlabRows, tuple[mx.array, mx.array], int]:
        """Return the rows, keys and values, and the period; :meth:`hold` takes them with the pass's tokens.

        Args:
            kv_shape: Heads of keys and their numbers, of arrays in float32 that are still to be made.
        """
        self._make_room()
        if self.keys is None:
            heads, head_dim = kv_shape
            like = mx.zeros((1, heads, 1, head_dim))
            self.keys, self.values = self._blank(like), self._blank(like)
        assert self.values is not None, "there are both or none"
        self._written_pass = self._positions.pass_number
        (rows,) = self._positions.by_slab()
        return rows, (self.keys, self.values), self._period

    def hold(self, keys: mx.array, values: mx.array) -> None:
        """Take the arrays of :meth:`ring_to_write` with the pass's tokens."""
        self.keys, self.values = keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Read all columns that any row may see; see :meth:`update_and_fetch`."""
        rows = len(self._positions.lengths)
        keys, values = (array[:rows, :, : self._width] for array in self.state)
        return keys, values

    def join(self, cache: Cache, index: int) -> None:
        """Copy in the batch's last row; see :class:`PositionedKv`."""
        del index  # it is alone
        self.place(len(self._positions.lengths) - 1, _in_order(cache))

    def place(self, row: int, arrays: Sequence[mx.array]) -> None:
        """Copy a row in, after all others, which are copied only where there is no place for it.

        Its keys and values [1, kv_heads, columns, n] are of its last positions, in their order, no more than
        the window has; none without positions.
        """
        lengths = self._positions.lengths
        self._lay_out(
            self._places if row < self._places else self._roomy(row + 1),
            self._grown(max(lengths)),
            mx.array(lengths[:row], dtype=mx.int32),
            max(lengths[:row], default=0),
        )
        if self.keys is None and arrays:
            self.keys, self.values = (self._blank(one) for one in arrays)
        for array, one in zip(self.state, arrays or (None,) * len(self.state), strict=True):
            # The whole place is written: its last row may have left a NaN, and 0 x NaN is NaN.
            array[row : row + 1] = 0 if one is None else self._ring(one, lengths[row])

    def select(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order, which the positions have kept already."""
        move_rows(self.state, order)
        places, columns = self._roomy(len(order)), self._least_columns()
        if places * columns * _MAX_SPARE < self._places * self._columns:
            lengths = self._positions.lengths
            self._lay_out(places, columns, mx.array(lengths, dtype=mx.int32), max(lengths))
            mx.eval(self.state)  # frees the old arrays

    def grow_early(self) -> bool:
        """Grow before it is needed, for a row more and for the next positions; return False if there is room."""
        if self.keys is None:
            return False
        positions = self._positions
        rows = len(positions.lengths)
        places, columns = self._places, self._columns
        if places == rows:
            places = self._roomy(rows)
        if columns < min(positions.width + _AHEAD_TOKENS, self._least_columns()):
            columns = self._grown(max(positions.width, columns + 1))
        if (places, columns) == (self._places, self._columns):
            return False
        self._lay_out(places, columns, positions.start, positions.width - positions.tokens)
        return True

    def wipe(self, row: int, begin: int = 0) -> None:
        """Zero a row's positions from one on, and all that no token from there on sees.

        A NaN would reach later tokens through a mask, as 0 x NaN is NaN.
        """
        held = self._held(mx.array([begin], dtype=mx.int32), self._columns)[0]
        is_kept = (held >= max(0, begin - self.max_size + 1))[:, None]  # [columns, 1]
        for array in self.state:
            array[row : row + 1] = mx.where(is_kept, array[row : row + 1], 0)

    def window_state(self, row: int) -> RowWindow:
        """Copy a row as the state of mlx-lm's window of one row.

        Returns:
            Keys and values [1, kv_heads, columns, n] in order of position, at most as many as the window has,
            and the row's positions, sinks, window and next column.
        """
        if self.keys is None or self.values is None:
            return None, None, 0, 0, self.max_size, 0
        length = self._positions.lengths[row]
        kept = min(length, self.max_size)
        columns = mx.arange(length - kept, length, dtype=mx.int32) % self._period
        keys, values = (array[row : row + 1, :, columns] for array in self.state)
        return keys, values, length, 0, self.max_size, kept

    def added_bytes(self, joining: Sequence[JoiningRow], tokens: int) -> int:
        """Return the bytes by which new arrays exceed the present ones."""
        return max(0, self.new_array_bytes(joining, tokens) - self.nbytes)

    def new_array_bytes(self, joining: Sequence[JoiningRow], tokens: int) -> int:
        """Return the whole size of the new arrays that a pass of so many tokens needs after rows have joined; 0 for none."""
        if self.keys is None:
            return 0
        lengths = [*self._positions.lengths, *(row.length for row in joining)]
        limits = [*self._positions.limits, *(row.limit for row in joining)]
        period = self._period_of(tokens)
        is_turned = max(self._positions.lengths) > self._period < period
        columns = period if is_turned else self._grown(max(lengths) + tokens, max(limits), period)
        places = self._places if len(lengths) <= self._places else self._roomy(len(lengths))
        if (places, columns) == (self._places, self._columns):
            return 0
        return self.nbytes // (self._places * self._columns) * places * columns

    @property
    def _width(self) -> int:
        """Columns that the running pass reads."""
        return min(self._positions.width, self._columns)

    def _held(self, ends: mx.array, width: int) -> mx.array:
        """Return the position in each of the first columns of rows that end at ``ends``: int32 [rows, width], negative for none."""
        last = ends[:, None] - 1
        return last - (last - mx.arange(width, dtype=mx.int32)) % self._period

    def _make_room(self) -> None:
        positions = self._positions
        start, longest = positions.start, positions.width - positions.tokens
        self._lengthen_period(self._period_of(positions.tokens), start, longest)
        columns = self._grown(positions.width)
        places = max(self._places, len(positions.lengths))
        self._lay_out(places, columns, start, longest)

    def _period_of(self, tokens: int) -> int:
        """Return the period for a pass of so many tokens; it never becomes shorter."""
        span = -(-(tokens - 1) // _SPAN_STEP) * _SPAN_STEP
        return max(self._period, self.max_size + span)

    def _lengthen_period(self, period: int, ends: mx.array, longest: int) -> None:
        """Re-lay the rings of rows that have wrapped, in all layers in the same pass, as layers share masks."""
        if period <= self._period:
            return
        held, self._period = self._period, period
        if longest > held:
            self._columns = period
            if self.keys is not None and self.values is not None:
                self.keys = self._turned(self.keys, ends, held)
                self.values = self._turned(self.values, ends, held)

    def _least_columns(self) -> int:
        """Return the columns that the rows may come to need."""
        positions = self._positions
        return min(self._period, max(*positions.lengths, *positions.limits))

    def _roomy(self, rows: int) -> int:
        """Return the number of places for these rows, spare ones included."""
        return max(rows, min(rows + max(1, rows // 4), self._max_rows))

    def _grown(self, needed: int, limit: int | None = None, period: int | None = None) -> int:
        """Return the columns for rows of up to ``needed`` positions; limit and period are the present ones unless given."""
        limit = max(self._positions.limits, default=0) if limit is None else limit
        period = self._period if period is None else period
        if needed <= self._columns or self._columns == period:
            return self._columns
        # Half as much again, so that growing stays rare; never more than any row may use.
        columns = -(-max(needed, self._columns * 3 // 2) // COLUMN_STEP) * COLUMN_STEP
        return min(columns, max(needed, limit), period)

    def _lay_out(self, places: int, columns: int, ends: mx.array, longest: int) -> None:
        """Make arrays of another shape, unless they have it, for rows that end at ``ends`` (int32 [rows]), the longest at ``longest``."""
        if (places, columns) == (self._places, self._columns):
            return
        assert columns == self._period or longest <= columns, (
            "a ring is whole once it has gone round"
        )
        self._places, self._columns = places, columns
        if self.keys is None or self.values is None:
            return
        self.keys, self.values = (
            mx.contiguous(
                _extended(_extended(array[: ends.size, :, :columns], columns, 2), places, 0)
            )
            for array in (self.keys, self.values)
        )

    def _turned(self, array: mx.array, ends: mx.array, held: int) -> mx.array:
        """Return rings of ``held`` columns as rings of the period: [places, kv_heads, period, n]."""
        positions = self._held(ends, self._period)
        is_held = (positions >= 0) & (positions >= ends[:, None] - held)  # [rows, period]
        source = mx.where(is_held, positions % held, 0)
        rows = mx.take_along_axis(array[: ends.size], source[:, None, :, None], axis=2)
        return _extended(mx.where(is_held[:, None, :, None], rows, 0), array.shape[0], 0)

    def _ring(self, array: mx.array, length: int) -> mx.array:
        """Turn a row's last positions, in their order, into its ring: [1, kv_heads, columns, n]."""
        kept = array.shape[2]
        padded = mx.pad(array, [(0, 0), (0, 0), (0, self._columns - kept), (0, 0)])
        first = (length - kept) % self._period
        return mx.roll(padded, first, 2) if first else padded

    def _write(self, array: mx.array, new: mx.array) -> None:
        positions = self._positions
        rows, _, tokens, _ = new.shape
        shared = positions.common_start
        first = None if shared is None else shared % self._period
        if first is not None and first + tokens <= self._columns:
            array[:rows, :, first : first + tokens] = new
            return
        places = mx.arange(rows, dtype=mx.int32)
        if tokens == 1:
            array[places, :, positions.start % self._period] = new[:, :, 0]  # [rows, kv_heads, n]
            return
        # A shorter row's padding takes the columns of positions that its next tokens do not see.
        columns = (positions.start[:, None] + mx.arange(tokens, dtype=mx.int32)) % self._period
        array[places[:, None], :, columns] = new.transpose(0, 2, 1, 3)

    def _blank(self, like: mx.array) -> mx.array:
        _, heads, _, n = like.shape
        return mx.zeros((self._places, heads, self._columns, n), dtype=like.dtype)


class WindowCheckpoint(StateCheckpoint):
    """A window of one row's own cache, before a pass."""

    def cut(self, count: int) -> bool:
        """Drop the last columns, if the others are all that the row will see."""
        keys, values, offset, keep, max_size, index = self._cache.state
        if keys is None:
            return True
        if not _is_cuttable(keys, offset, index, max_size, count):
            return False
        kept = index - count
        # Columns after the index would be taken for the older ones of a ring.
        keys, values = keys[..., :kept, :], values[..., :kept, :]
        self._cache.state = (keys, values, offset - count, keep, max_size, kept)
        return True


def _is_cuttable(keys: mx.array, offset: int, index: int, max_size: int, count: int) -> bool:
    """Return True if a window without its last columns is still a whole window, in order.

    Columns before the index are in order of position after a pass of several tokens, and as long as
    there was room for every position.
    """
    is_ordered = index in (keys.shape[2], offset)
    return is_ordered and index - count >= min(offset - count, max_size)


def _whole(state: RowWindow) -> RowWindow:
    """Return a rotating cache's state without columns that it is about to drop or has not filled yet."""
    keys, values, offset, keep, max_size, index = state  # keys and values [1, heads, columns, n]
    if keys is None or values is None:
        return state
    extra = keys.shape[2] - max_size
    if extra > 0:
        # After several tokens at once it has more than its window, in their order.
        keys, values = (
            mx.concatenate([one[..., :keep, :], one[..., extra + keep :, :]], axis=2)
            for one in (keys, values)
        )
        index = max_size
    elif offset < keys.shape[2]:
        keys, values = keys[..., :offset, :], values[..., :offset, :]
        index = offset
    return keys, values, offset, keep, max_size, index


def _in_order(cache: Cache) -> tuple[mx.array, ...]:
    """Return keys and values [1, heads, columns, n] of a row's window, in order of position.

    No more columns than the window has positions; none before the first write.
    """
    keys, values, _, _, _, index = _whole(cache.state)
    if keys is None or values is None:
        return ()
    if index < keys.shape[2]:  # the oldest position lies where the next one goes
        keys, values = (mx.roll(one, -index, 2) for one in (keys, values))
    return keys, values


def _extended(array: mx.array, size: int, axis: int) -> mx.array:
    """Add zeros behind an array so that an axis has a size."""
    shape = [*array.shape]
    missing = size - shape[axis]
    if not missing:
        return array
    shape[axis] = missing
    zeros = mx.broadcast_to(mx.array(0, dtype=array.dtype), shape)  # no memory of its own
    return mx.concatenate([array, zeros], axis)
