"""Keys and values of a whole batch in one array a layer, each row from its own column 0.

A row's token at position ``p`` lies in column ``p`` of the row. Nothing is shifted when a row joins or
leaves, masks and windows are those of the row alone, and a step writes one column a row. Columns after
a row's end hold what other rows left, and are masked out.

The array has room to spare in both directions, so a join writes the joining row and nothing else. When
the room is used up the array is laid out anew, half as large again, and when it is far too large,
smaller. Only then are other rows copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.kv.kv_format import PLAIN, FoldedKv, KvFormat, KvWidths
from machd.engine.kv.quantized_cache import STEP_TOKENS, FormatCache
from machd.engine.kv.row_positions import RowGroup, RowPositions
from machd.engine.protocol.step import slab_rows

_SLICED_COST = 3
"""Time that the CPU takes to make floats of a column in a slice, over that of one in the whole array."""

_MAX_SPARE = 2
"""When rows leave, an array is laid out anew if it is more than so many times what the remaining rows
may come to need, which is what the KV budget has promised them."""


class SlabCache(FormatCache):
    """One layer's keys and values, with the methods that mlx-lm's models expect of a cache."""

    def __init__(self, positions: RowPositions, max_rows: int, kv_format: KvFormat = PLAIN) -> None:
        """Begin without rows.

        Args:
            positions: The batch's, shared by its layers.
            max_rows: Rows that there can ever be.
            kv_format: Storage of keys and values.
        """
        super().__init__(kv_format)
        self._positions = positions
        self._max_rows = max_rows
        self._written_step = 0

    @property
    def offset(self) -> mx.array:
        """Positions of each row, int32 [rows]; this layer's new tokens count once written."""
        positions = self._positions
        return positions.end if self._written_step == positions.step else positions.start

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self._positions.lengths)

    @property
    def row_groups(self) -> list[RowGroup]:
        """Groups of rows of about one length, for a step of one token."""
        return self._positions.row_groups()

    def size(self) -> int:
        """Return the positions of the longest row."""
        return max(self._positions.lengths, default=0)

    def is_trimmable(self) -> bool:
        """Return False: rows end at different positions, so the whole cannot be cut."""
        return False

    def make_mask(
        self,
        N: int,  # noqa: N803 - mlx-lm's name, and models may use it
        return_array: bool = False,  # noqa: FBT001, FBT002 - mlx-lm's signature
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """Make the mask of the running step, or mlx-lm's name for it where rows are equally long."""
        positions = self._positions
        assert positions.tokens == N, "the step was opened for so many tokens"
        if positions.shared_start is not None and window_size is None and not return_array:
            return None if N == 1 else "causal"
        return positions.mask(window_size)

    def sees_all(self, mask: mx.array | str | None) -> bool:
        """Return True if a mask of :meth:`make_mask` lets each row see all its positions."""
        return mask is None or mask is self._positions.mask(None)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the step's tokens and read all columns that any row may see.

        Args:
            keys: [rows, heads, tokens, head_dim].
            values: The same, with a head_dim of its own.

        Returns:
            Keys and values [rows, heads, width, head_dim].
        """
        self.write(keys, values)
        return self.keys_and_values()

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Write the step's tokens; see :meth:`update_and_fetch`."""
        positions = self._positions
        new = self.kv_format.encode(keys, values)
        self._make_room(new, keys.shape[0], positions.width)
        self.arrays = [self._written(*pair) for pair in zip(self.arrays, new, strict=True)]
        self._widths = KvWidths.of(keys, values)
        self._written_step = positions.step

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Read all columns that any row may see; see :meth:`update_and_fetch`."""
        return self.decoded(0, self.rows, self._positions.width)

    def folded(self, begin: int, end: int, width: int) -> FoldedKv | None:
        """Fold rows ``begin`` to ``end`` up to a column, for attention without decoding.

        The parts cover more columns than ``width`` where those cost less than a slice.
        """
        rows, _, columns, _ = self.arrays[0].shape
        seen = self.arrays
        if columns > width * _SLICED_COST:
            columns = width
        if (begin, end, columns) != (0, rows, self.arrays[0].shape[2]):
            seen = [array[begin:end, :, :columns] for array in seen]
        return self.kv_format.fold(seen, self._known_widths, width)

    def place(self, row: int, arrays: Sequence[mx.array]) -> None:
        """Copy a row in.

        Args:
            row: Its place, after all others.
            arrays: [1, heads, length, n] each, of this cache's format; none without positions.
        """
        if arrays:
            self._make_room(arrays, row + 1, arrays[0].shape[2])
        elif self.arrays:
            self._make_room(self.arrays, row + 1, 0)
        for slab, array in zip(self.arrays, arrays, strict=bool(arrays)):
            if array.size:
                slab[row : row + 1, :, : array.shape[2]] = array

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, their old places, once the batch's positions have kept them.

        A row is copied only if it changes its place.
        """
        if not self.arrays:
            return
        lengths = self._positions.lengths
        held_rows, held_columns = self._shape
        rows = slab_rows(len(order), self._max_rows)
        columns = min(held_columns, max(self._positions.limits))
        if rows * columns * _MAX_SPARE < held_rows * held_columns:
            self._shrink(order, rows, columns)
            return
        moves = [(old, new) for new, old in enumerate(order) if old != new]
        for slab in self.arrays:
            copies = [mx.contiguous(slab[old : old + 1, :, : lengths[new]]) for old, new in moves]
            # Before the slab is written, or all of it would be copied to keep what they read.
            mx.eval(copies)
            for copy, (_, new) in zip(copies, moves, strict=True):
                slab[new : new + 1, :, : copy.shape[2]] = copy

    def wipe(self, row: int, begin: int = 0) -> None:
        """Zero a row from a column on: a NaN reaches later tokens through a mask, as 0 x NaN is NaN."""
        for slab in self.arrays:
            if row < slab.shape[0] and begin < slab.shape[2]:
                slab[row : row + 1, :, begin:] = 0

    def layout(self, rows: int, tokens: int, limits: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of the array once it has room for ``rows`` rows of ``tokens`` positions.

        Args:
            rows: Rows of the batch then.
            tokens: Positions of the longest.
            limits: Positions that each of them may ever have.
        """
        held_rows, held_columns = self._shape
        if rows <= held_rows and tokens <= held_columns:
            return held_rows, held_columns
        new_rows = max(held_rows, slab_rows(rows, self._max_rows))
        # Half as much again, so that growing stays rare; never more than any row may use, which is
        # less than there was if a longer row has left.
        wanted = held_columns
        if tokens > held_columns:
            wanted = -(-max(tokens, held_columns * 3 // 2) // STEP_TOKENS) * STEP_TOKENS
        return new_rows, min(wanted, max(tokens, *limits))

    @property
    def _shape(self) -> tuple[int, int]:
        """Rows and columns held."""
        if not self.arrays:
            return 0, 0
        rows, _, columns, _ = self.arrays[0].shape
        return rows, columns

    def _written(self, slab: mx.array, new: mx.array) -> mx.array:
        positions = self._positions
        if not new.size:
            return slab
        start = positions.shared_start
        if start is not None:
            slab[: new.shape[0], :, start : start + new.shape[2]] = new
        elif positions.tokens == 1:
            slab[positions.rows, :, positions.start] = new[:, :, 0]  # [rows, heads, n]
        else:
            # A shorter row's padding lands after its end, where its next tokens will overwrite it.
            offsets = mx.arange(positions.tokens, dtype=mx.int32)
            columns = positions.start[:, None] + offsets  # [rows, tokens]
            by_column = new.transpose(0, 2, 1, 3)  # [rows, tokens, heads, n]
            slab[positions.rows[:, None], :, columns] = by_column
        return slab

    def _make_room(self, like: Sequence[mx.array], rows: int, tokens: int) -> None:
        shape = self.layout(rows, tokens, self._positions.limits)
        if shape == self._shape:
            return
        held: Sequence[mx.array | None] = self.arrays or [None] * len(like)
        self.arrays = [_laid_out(old, one, *shape) for old, one in zip(held, like, strict=True)]

    def _shrink(self, order: Sequence[int], rows: int, columns: int) -> None:
        index = mx.array(list(order), dtype=mx.int32)
        for place, slab in enumerate(self.arrays):
            kept = slab[:, :, :columns][index]
            self.arrays[place] = _laid_out(kept, kept, rows, columns)
        mx.eval(self.arrays)


def _laid_out(old: mx.array | None, like: mx.array, rows: int, tokens: int) -> mx.array:
    """Copy ``old`` to the front of a zeroed array [rows, heads, tokens, head_dim]."""
    new = mx.zeros((rows, like.shape[1], tokens, like.shape[3]), dtype=like.dtype)
    if old is not None and old.size:
        new[: old.shape[0], :, : old.shape[2]] = old[:, :, :tokens]
    return new
