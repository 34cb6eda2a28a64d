"""Layouts of a batch: slabs of rows that have the same number of columns, each slab an array a layer.

Rows that share a prefix have columns for what follows it, and lie in slabs of their own.

A layout is planned once for all layers. Two rules make one: :class:`LengthClasses`, in which a long row adds no
columns to short ones, where ``kernels/fused_llama.py`` attends slab by slab (the CPU, one process); and :class:`OneSlab`
for all other models, which read one array. Both stay close to the reservations of the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from machd.engine.protocol.slab_size import (
    COLUMN_STEP,
    CROWDED_COLUMNS,
    class_columns,
    reserved_columns,
    slab_rows,
)

_SLAB_COLUMNS = 4096
"""Most columns of a slab, over all rows, before another one is begun: adding a place copies them."""

_MAX_SPARE = 2
"""Slabs are laid out anew when rows leave and the slabs exceed the other rows' KV reservations by this
factor."""

_MAX_ROOM = 1.25
"""Size of length classes, spare places included, over the rows' reservations, when a row joins or grows."""


@dataclass(frozen=True, slots=True)
class RowExtent:
    """A row's demand of columns.

    Attributes:
        row_id: Identifies the row as long as it is in the batch.
        needed: Columns that it needs now.
        limit: Columns that it may ever need.
        prefix: Number of the shared prefix that its columns follow; None where they begin at position 0.
    """

    row_id: int
    needed: int
    limit: int
    prefix: int | None = None


@dataclass(frozen=True, slots=True)
class Slab:
    """An array a layer.

    Attributes:
        number: Its name as long as it exists.
        places: Rows that there is room for.
        rows: Ids of the rows, from place 0 on.
        prefix: Number of the shared prefix that all its rows' columns follow, if any.
    """

    number: int
    columns: int
    places: int
    rows: tuple[int, ...]
    prefix: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Places and columns."""
        return self.places, self.columns


Layout = tuple[Slab, ...]


class LayoutRule(Protocol):
    """Plans layouts."""

    def lay_out(self, before: Layout, rows: Sequence[RowExtent]) -> Layout:
        """Find a place for each row, moving as few as possible; rows of ``before`` that are not among them have left."""
        ...


class OneSlab:
    """All rows in one slab, in the batch's order, as long as the longest."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._numbers = count()

    def lay_out(self, before: Layout, rows: Sequence[RowExtent]) -> Layout:
        """Keep the slab while it is large enough and at most ``_MAX_SPARE`` times too large."""
        row_ids = tuple(row.row_id for row in rows)
        held_places, held_columns = (before[0].places, before[0].columns) if before else (0, 0)
        needed, limit = max(row.needed for row in rows), max(row.limit for row in rows)
        least_places = slab_rows(len(rows), self._max_rows)
        least_columns = max(needed, min(held_columns, limit))
        if least_places * least_columns * _MAX_SPARE < held_places * held_columns:
            return (Slab(next(self._numbers), least_columns, least_places, row_ids),)
        if len(rows) <= held_places and needed <= held_columns:
            return (replace(before[0], rows=row_ids),)
        # Half as much again, so that growing stays rare; never more than any row may use, which is
        # less than there was if a longer row has left.
        columns = held_columns
        if needed > held_columns:
            columns = _rounded(max(needed, held_columns * 3 // 2))
        columns = min(columns, max(needed, limit))
        return (Slab(next(self._numbers), columns, max(held_places, least_places), row_ids),)


class LengthClasses:
    """Rows of about one length in slabs of their own; a row that outgrows its class moves alone."""

    def __init__(self) -> None:
        self._numbers = count()

    def lay_out(self, before: Layout, rows: Sequence[RowExtent]) -> Layout:
        """Keep rows in their places while these are long enough, and fill the gaps that others leave."""
        held = {row_id: slab.columns for slab in before for row_id in slab.rows}
        wanted = {
            row.row_id: (_columns_of(row, held.get(row.row_id, 0)), row.prefix) for row in rows
        }
        slabs = [_Filling(slab, wanted) for slab in before]
        settled = {row_id for slab in slabs for row_id in slab.rows}
        homeless = [row_id for row_id in wanted if row_id not in settled]
        for row_id in homeless:
            self._place(slabs, row_id, wanted[row_id])
        for kind in {slab.kind for slab in slabs}:
            _close_gaps([slab for slab in slabs if slab.kind == kind])
        filled = [slab for slab in slabs if slab.row_ids]
        promised = reserved_columns(max(row.limit, row.needed) for row in rows)
        return _within(filled, int(promised * (_MAX_ROOM if homeless else _MAX_SPARE)))

    def _place(self, slabs: list[_Filling], row_id: int, kind: _Kind) -> None:
        alike = [slab for slab in slabs if slab.kind == kind]
        columns, prefix = kind
        for slab in alike:
            if slab.take(row_id):
                return
        most = max(1, _SLAB_COLUMNS // columns)
        for slab in alike:
            if slab.places < most:
                slab.places = min(2 * slab.places, most)
                slab.take(row_id)
                return
        begun = Slab(next(self._numbers), columns, 1, (row_id,), prefix)
        slabs.append(_Filling(begun, {row_id: kind}))


_Kind = tuple[int, int | None]
"""Columns and prefix: rows with the same may lie in one slab."""


class _Filling:
    """A slab whose rows are being placed; a gap is None."""

    def __init__(self, slab: Slab, wanted: Mapping[int, _Kind]) -> None:
        self.number, self.places = slab.number, slab.places
        self.kind = slab.columns, slab.prefix
        self.rows: list[int | None] = [
            row_id if wanted.get(row_id) == self.kind else None for row_id in slab.rows
        ]

    @property
    def row_ids(self) -> list[int]:
        """Its rows, gaps left out."""
        return [row_id for row_id in self.rows if row_id is not None]

    @property
    def columns(self) -> int:
        return self.kind[0]

    @property
    def slab(self) -> Slab:
        """The slab, once its rows are placed."""
        columns, prefix = self.kind
        return Slab(self.number, columns, self.places, tuple(self.row_ids), prefix)

    @property
    def has_room(self) -> bool:
        return None in self.rows or len(self.rows) < self.places

    def take(self, row_id: int) -> bool:
        """Place a row, if there is room."""
        if None in self.rows:
            self.rows[self.rows.index(None)] = row_id
            return True
        if len(self.rows) < self.places:
            self.rows.append(row_id)
            return True
        return False


def _columns_of(row: RowExtent, held: int) -> int:
    """Return the columns of a row's class; the row stays in its class as long as they suffice."""
    if held and held >= row.needed:
        return held
    columns = class_columns(row.needed)
    if columns > CROWDED_COLUMNS:  # alone in its slab, which need not be like others
        columns = min(columns, _rounded(max(row.needed, row.limit)))
    return columns


def _close_gaps(slabs: Sequence[_Filling]) -> None:
    """Move the last rows of a class into its gaps, so that all slabs but its last one are full."""
    while True:
        for slab in slabs:
            while slab.rows and slab.rows[-1] is None:
                slab.rows.pop()
        slabs = [slab for slab in slabs if slab.rows]
        gap = next((slab for slab in slabs if slab.has_room), None)
        if gap is None or (gap is slabs[-1] and None not in gap.rows):
            return
        gap.take(_taken(slabs[-1]))


def _taken(slab: _Filling) -> int:
    row_id = slab.rows.pop()
    assert row_id is not None, "trailing gaps are gone"
    return row_id


def _within(slabs: Sequence[_Filling], columns: int) -> Layout:
    """Make the layout, with fewer empty places if it would have more columns than ``columns``."""
    if sum(slab.places * slab.columns for slab in slabs) > columns:
        for slab in slabs:
            slab.places = min(slab.places, int(len(slab.rows) * _MAX_ROOM))
    return tuple(slab.slab for slab in slabs)


def _rounded(columns: int) -> int:
    return -(-columns // COLUMN_STEP) * COLUMN_STEP
