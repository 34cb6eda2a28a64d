"""Keys and values of a whole batch in one array a layer, each row from its own position 0.

A row's token at position ``p`` lies in column ``p`` of the row. Nothing has to be shifted when a row
joins or leaves, masks and windows are those of the row alone, and a step writes one column a row.
What lies behind a row's end is left from others and masked out.

The array has room to spare in both directions, so a join writes the joining row and nothing else.
When the room is used up the array is laid out anew, with half as much again, and when far too much
is left, with less. Only then are other rows copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from machd.engine.kv.formats import PLAIN
from machd.engine.kv.kv_format import FoldedKv, KvFormat, KvWidths
from machd.engine.kv.row_positions import RowGroup, RowPositions
from machd.engine.protocol.step import slab_rows

_TOKENS_STEP = 256
"""Columns are allocated in multiples of this, as mlx-lm's caches do."""

_SLICED_COST = 3
"""How many times longer the CPU takes to make floats of a column if it has to pick columns out."""

_MAX_SPARE = 2
"""When rows leave, an array is laid out anew if it is more than so many times what those that stay
may come to need, which is what the KV budget has promised them."""


class SlabCache:
    """One layer's keys and values, in the shape that mlx-lm's models expect of a cache.

    They are kept as arrays of a format; the model gets what it would get of the plain ones, or near
    it, so no model needs to know.
    """

    def __init__(self, positions: RowPositions, max_rows: int, kv_format: KvFormat = PLAIN) -> None:
        """Begin without rows.

        Args:
            positions: The batch's, shared by its layers.
            max_rows: Rows that there can ever be.
            kv_format: How keys and values are kept.
        """
        self._positions = positions
        self._max_rows = max_rows
        self._written_step = 0
        self._widths: KvWidths | None = None
        self.kv_format = kv_format
        self.arrays: list[mx.array] = []
        """[rows, heads, columns, n] each, with room to spare; none before anything was written."""

    @property
    def keys(self) -> mx.array | None:
        """The first array. Models that tie arrays together with ``mx.depends`` ask for it."""
        return self.arrays[0] if self.arrays else None

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.arrays[0] = array

    @property
    def values(self) -> mx.array | None:
        """The last array; see :attr:`keys`."""
        return self.arrays[-1] if self.arrays else None

    @values.setter
    def values(self, array: mx.array) -> None:
        # A model that never reads its values may put others in their place, to have no graph of
        # them. Elsewhere than in plain arrays they are part of what the keys are computed with.
        if self.kv_format is PLAIN:
            self.arrays[-1] = array

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
        """The rows in stretches of about one length, for a step of one token."""
        return self._positions.row_groups()

    @property
    def state(self) -> tuple[mx.array, ...]:
        """What a forward pass has to compute."""
        return tuple(self.arrays)

    @property
    def nbytes(self) -> int:
        """Bytes held, room to spare included."""
        return sum(array.nbytes for array in self.arrays)

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return not self.arrays

    def size(self) -> int:
        """Positions of the longest row."""
        return max(self._positions.lengths, default=0)

    def is_trimmable(self) -> bool:
        """Rows end at different positions: the whole cannot be cut."""
        return False

    def make_mask(
        self,
        N: int,  # noqa: N803 - mlx-lm's name, and models may use it
        return_array: bool = False,  # noqa: FBT001, FBT002 - mlx-lm's signature
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """The mask of the running step, or what stands for it where rows are equally long."""
        positions = self._positions
        assert positions.tokens == N, "the step was opened for so many tokens"
        if positions.shared_start is not None and window_size is None and not return_array:
            return None if N == 1 else "causal"
        return positions.mask(window_size)

    def sees_all(self, mask: mx.array | str | None) -> bool:
        """Whether a mask of :meth:`make_mask` lets each row see all that it has."""
        return mask is None or mask is self._positions.mask(None)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the step's tokens and give all that rows may look at.

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
        """What the rows may look at; see :meth:`update_and_fetch`."""
        return self.decoded(0, self.rows, self._positions.width)

    def decoded(self, begin: int, end: int, width: int) -> tuple[mx.array, mx.array]:
        """Keys and values of some rows up to a column [rows, heads, width, head_dim]."""
        seen = [array[begin:end, :, :width] for array in self.arrays]
        return self.kv_format.decode(seen, self._known_widths)

    def folded(self, begin: int, end: int, width: int) -> FoldedKv | None:
        """The same as sums of products; of more columns where those are cheaper than fewer."""
        columns = self.arrays[0].shape[2]
        if columns > width * _SLICED_COST:
            columns = width
        rows = self.arrays[0].shape[0]
        seen = self.arrays
        if (begin, end, columns) != (0, rows, self.arrays[0].shape[2]):
            seen = [array[begin:end, :, :columns] for array in seen]
        return self.kv_format.fold(seen, self._known_widths, width)

    def place(self, row: int, arrays: Sequence[mx.array]) -> None:
        """Copy a row in.

        Args:
            row: Where it goes, behind all others.
            arrays: [1, heads, length, n] each, of this cache's format.
        """
        length = arrays[0].shape[2]
        self._make_room(arrays, row + 1, length)
        for slab, array in zip(self.arrays, arrays, strict=True):
            if array.size:
                slab[row : row + 1, :, :length] = array

    def place_empty(self, row: int) -> None:
        """Make room for a row without positions, behind all others.

        Before anything was written there is nothing to make room in: the first step does.
        """
        if self.arrays:
            self._make_room(self.arrays, row + 1, 0)

    def keep(self, order: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep the rows of ``order``: a row is copied only if it changes its place.

        Args:
            order: The old place of each row that stays.
            lengths: Their positions.
        """
        if not self.arrays:
            return
        held_rows, held_columns = self.arrays[0].shape[0::2]
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
        """Zero a row from a column on.

        What is no number would reach later tokens of the place even through a mask.
        """
        for slab in self.arrays:
            if row < slab.shape[0] and begin < slab.shape[2]:
                slab[row : row + 1, :, begin:] = 0

    @property
    def _known_widths(self) -> KvWidths:
        assert self._widths is not None, "a layer is written before it is read"
        return self._widths

    def _written(self, slab: mx.array, new: mx.array) -> mx.array:
        positions = self._positions
        if not new.size:
            return slab
        start = positions.shared_start
        if start is not None:
            slab[: new.shape[0], :, start : start + new.shape[2]] = new
        elif positions.tokens == 1:
            slab[positions.rows, :, positions.start] = new[:, :, 0]
        else:
            # A shorter row's padding lands behind its end, where its next tokens will overwrite it.
            columns = positions.start[:, None] + mx.arange(positions.tokens, dtype=mx.int32)
            slab[positions.rows[:, None], :, columns] = new.transpose(0, 2, 1, 3)
        return slab

    def layout(self, rows: int, tokens: int, limits: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of the array once it has room for ``rows`` rows of ``tokens`` positions.

        Args:
            rows: Rows of the batch then.
            tokens: Positions of the longest.
            limits: Positions that each of them may ever have.
        """
        held_rows, held_tokens = self.arrays[0].shape[0::2] if self.arrays else (0, 0)
        if rows <= held_rows and tokens <= held_tokens:
            return held_rows, held_tokens
        new_rows = max(held_rows, slab_rows(rows, self._max_rows))
        # Half as much again, so that growing stays rare; never more than any row may use, which is
        # less than there was if a longer row has left.
        wanted = held_tokens
        if tokens > held_tokens:
            wanted = _columns(max(tokens, held_tokens * 3 // 2))
        return new_rows, min(wanted, max(tokens, *limits))

    def _make_room(self, like: Sequence[mx.array], rows: int, tokens: int) -> None:
        held_shape = self.arrays[0].shape[0::2] if self.arrays else (0, 0)
        new_rows, new_tokens = self.layout(rows, tokens, self._positions.limits)
        if (new_rows, new_tokens) == tuple(held_shape):
            return
        held: Sequence[mx.array | None] = self.arrays or [None] * len(like)
        self.arrays = [
            _laid_out(old, one, new_rows, new_tokens) for old, one in zip(held, like, strict=True)
        ]

    def _shrink(self, order: Sequence[int], rows: int, columns: int) -> None:
        index = mx.array(list(order), dtype=mx.int32)
        for place, slab in enumerate(self.arrays):
            kept = slab[:, :, :columns][index]
            self.arrays[place] = _laid_out(kept, kept, rows, columns)
        mx.eval(self.arrays)


def _laid_out(old: mx.array | None, like: mx.array, rows: int, tokens: int) -> mx.array:
    """A zeroed array [rows, heads, tokens, head_dim] that begins with what ``old`` holds."""
    new = mx.zeros((rows, like.shape[1], tokens, like.shape[3]), dtype=like.dtype)
    if old is not None and old.size:
        new[: old.shape[0], :, : old.shape[2]] = old[:, :, :tokens]
    return new


def _columns(tokens: int) -> int:
    return -(-tokens // _TOKENS_STEP) * _TOKENS_STEP
