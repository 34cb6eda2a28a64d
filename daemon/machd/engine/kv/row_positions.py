"""The positions of a batch's rows, the slabs where they lie, and their masks: one for all layers.

Positions count from the beginning of the text. A row that shares a prefix has columns of its own only from the
prefix's end on, and its columns count from there; for all other rows position and column are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from machd.engine.kv.lane_kv import JoiningRow
from machd.engine.kv.slab_layout import Layout, LayoutRule, RowExtent, Slab
from machd.engine.protocol.step import SharedPrefix


@dataclass(frozen=True, slots=True)
class SlabRows:
    """The rows of one slab in the running pass.

    Attributes:
        rows: Number of rows, in places 0 to ``rows``.
        index: int32 [rows], each row's place in the batch; None where the slab has all rows in their order.
        places: int32 [rows], 0 to ``rows``.
        start: int32 [rows], columns before the pass.
        common_start: The start of all rows where it is the same; None where it differs.
        width: Columns that the longest row has.
        prefix: Number of the shared prefix that comes before the columns of all rows, if any.
        mask: bool [rows, 1, tokens, width], the columns that each token sees; mlx-lm's "causal" where all rows
            begin at one place; None for all columns.
    """

    rows: int
    index: mx.array | None
    places: mx.array
    start: mx.array
    common_start: int | None
    width: int
    prefix: int | None
    mask: mx.array | str | None

    def of(self, batch: mx.array) -> mx.array:
        """Take these rows' part of an array with all rows of the batch."""
        return batch if self.index is None else batch[self.index]


class RowPositions:
    """The positions of each row of a batch, advanced once a pass.

    Attributes:
        lengths: Positions that each row has, in row order; those of the running pass included.
        limits: Positions that each row may ever have.
        shared: The prefix that each row shares, if any.
        row_ids: Each row's id in the layout, the same as long as the row is in the batch.
        layout: The slabs, with room for the running pass.
        pass_number: Number of the running pass.
        start: int32 [rows], positions before the running pass.
        end: int32 [rows], positions after it.
        tokens: Columns that the running pass writes for each row, padding included.
        width: Columns that the pass reads: up to the end of the longest row.
        common_start: The start of all rows where it is the same; None where it differs.
    """

    def __init__(self, rule: LayoutRule) -> None:
        self._rule = rule
        self._next_row_id = 0
        self.lengths: list[int] = []
        self.limits: list[int] = []
        self.shared: list[SharedPrefix | None] = []
        self.row_ids: list[int] = []
        self.layout: Layout = ()
        self.pass_number = 0
        self.tokens = 0
        self.width = 0
        self.common_start: int | None = None
        self.start = self.end = mx.zeros((0,), dtype=mx.int32)
        self._columns: list[int] = []
        self._filled: dict[int, int] = {}
        self._starts: list[int] = []
        self._is_changed = False
        self._masks: dict[tuple[int, int | None], mx.array] = {}
        self._by_slab: list[SlabRows] = []
        self._back: mx.array | None = None

    def append(self, length: int, limit: int, shared: SharedPrefix | None = None) -> None:
        """Add a row of ``length`` positions and at most ``limit``, perhaps with a shared prefix."""
        assert shared is None or shared.tokens <= length, "what is shared is computed"
        self.lengths.append(length)
        self.limits.append(limit)
        self.shared.append(shared)
        self.row_ids.append(self._next_row_id)
        self._next_row_id += 1
        self._lay_out()
        self._is_changed = True

    def select(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order."""
        self.lengths = [self.lengths[row] for row in order]
        self.limits = [self.limits[row] for row in order]
        self.shared = [self.shared[row] for row in order]
        self.row_ids = [self.row_ids[row] for row in order]
        self._lay_out()
        self._is_changed = True

    def cut(self, counts: Sequence[int]) -> None:
        """Remove the last ``counts[row]`` positions of each row; their columns then lie after its end."""
        self.lengths = [one - count for one, count in zip(self.lengths, counts, strict=True)]
        self.end = _int32(self.lengths)

    def begin_pass(self, lengths: Sequence[int] | None = None) -> None:
        """Begin a forward pass, with room for it."""
        self.pass_number += 1
        self.tokens = 1 if lengths is None else max(lengths)
        needed = [one + self.tokens for one in self._own(self.lengths)]
        if any(one > columns for one, columns in zip(needed, self._columns, strict=True)):
            self._lay_out(self.tokens)
        first = self.lengths[0]
        self.common_start = first if all(one == first for one in self.lengths) else None
        # The end of the last step is on the device already, unless rows have changed since.
        self.start = _int32(self.lengths) if self._is_changed else self.end
        self._is_changed = False
        self.width = max(self.lengths) + self.tokens
        self._masks.clear()
        self._by_slab.clear()
        self._starts = self._own(self.lengths)
        if lengths is None:
            self.end = self.start + 1
            self.lengths = [one + 1 for one in self.lengths]
        else:
            self.end = self.start + _int32(lengths)
            self.lengths = [one + new for one, new in zip(self.lengths, lengths, strict=True)]

    def room_tokens(self) -> int:
        """Return the most tokens, padding included, that a pass can have within the rows' reservations."""
        return min(
            max(columns, limit) - length
            for columns, limit, length in zip(
                self._columns, self._own(self.limits), self._own(self.lengths), strict=True
            )
        )

    def by_slab(self) -> list[SlabRows]:
        """Return the rows of each slab in the running pass."""
        if not self._by_slab:
            numbers = {row_id: number for number, row_id in enumerate(self.row_ids)}
            self._by_slab = [self._rows_of(slab, numbers) for slab in self.layout]
            order = [numbers[row_id] for slab in self.layout for row_id in slab.rows]
            back = sorted(range(len(order)), key=order.__getitem__)
            self._back = None if order == sorted(order) else _int32(back)
        return self._by_slab

    def in_row_order(self, parts: Sequence[mx.array]) -> mx.array:
        """Join the parts of an array with all rows, one of each slab, in the batch's order."""
        joined = parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
        return joined if self._back is None else joined[self._back]

    def base(self, row: int) -> int:
        """Return the position of a row's column 0."""
        shared = self.shared[row]
        return 0 if shared is None else shared.tokens

    def filled(self, row_id: int) -> int:
        """Return the number of columns that a row had when the layout was made, which are copied when it moves."""
        return self._filled[row_id]

    def after(self, joining: Sequence[JoiningRow], tokens: int) -> Layout:
        """Return the layout of a pass of so many tokens once rows have joined; nothing changes."""
        rows = self._extents(tokens)
        for row_id, row in enumerate(joining, start=self._next_row_id):
            rows.append(_extent(row_id, row, tokens))
        return self._rule.lay_out(self.layout, rows) if rows else ()

    def mask(self, window_tokens: int | None) -> mx.array:
        """Make the mask of the running pass, or take the one made before: bool [rows, 1, tokens, width], what each token sees."""
        key = (self.tokens, window_tokens)
        if key not in self._masks:
            self._masks[key] = _mask(self.start, self.tokens, self.width, window_tokens)
        return self._masks[key]

    def window_of(self, mask: object) -> int | None:
        """Return the window of a mask that :meth:`mask` has made for the running pass; None for any other."""
        return next((window for (_, window), made in self._masks.items() if made is mask), None)

    def _rows_of(self, slab: Slab, numbers: dict[int, int]) -> SlabRows:
        order = [numbers[row_id] for row_id in slab.rows]
        starts = [self._starts[row] for row in order]
        width = max(starts) + self.tokens
        shared = starts[0] if min(starts) == max(starts) else None
        places = mx.arange(len(order), dtype=mx.int32)
        is_whole = len(order) == len(self.row_ids) and order == sorted(order)
        index = None if is_whole else _int32(order)
        # The starts of the last step are on the device already.
        start = self.start if is_whole and slab.prefix is None else _int32(starts)
        mask: mx.array | str | None = None
        if shared is None and is_whole and slab.prefix is None:
            mask = self.mask(None)
        elif shared is None:
            mask = _mask(start, self.tokens, width)
        elif self.tokens > 1:
            mask = "causal"
        return SlabRows(len(order), index, places, start, shared, width, slab.prefix, mask)

    def _own(self, positions: Sequence[int]) -> list[int]:
        """Convert a position of each row to a column of the row."""
        return [one - self.base(row) for row, one in enumerate(positions)]

    def _extents(self, tokens: int = 0) -> list[RowExtent]:
        rows = map(JoiningRow, self.lengths, self.limits, self.shared)
        return [
            _extent(row_id, row, tokens) for row_id, row in zip(self.row_ids, rows, strict=True)
        ]

    def _lay_out(self, tokens: int = 0) -> None:
        self.layout = self._rule.lay_out(self.layout, self._extents(tokens))
        columns = {row_id: slab.columns for slab in self.layout for row_id in slab.rows}
        self._columns = [columns[row_id] for row_id in self.row_ids]
        self._filled = dict(zip(self.row_ids, self._own(self.lengths), strict=True))


def _extent(row_id: int, row: JoiningRow, tokens: int) -> RowExtent:
    base, prefix = (0, None) if row.shared is None else (row.shared.tokens, row.shared.number)
    return RowExtent(row_id, row.length + tokens - base, row.limit - base, prefix)


def _mask(start: mx.array, tokens: int, width: int, window_tokens: int | None = None) -> mx.array:
    """Make the mask of rows that begin a pass at ``start``: bool [rows, 1, tokens, width]."""
    columns = mx.arange(width, dtype=mx.int32)
    positions = start[:, None] + mx.arange(tokens, dtype=mx.int32)
    own = positions[:, None, :, None]  # [rows, 1, tokens, 1]
    mask = columns <= own  # [rows, 1, tokens, width]
    if window_tokens is not None:
        mask = mask & (columns > own - window_tokens)
    return mask


def _int32(values: Sequence[int]) -> mx.array:
    return mx.array(list(values), dtype=mx.int32)
