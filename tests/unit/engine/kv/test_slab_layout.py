"""Layouts hold every row, within what was promised, and move as few rows as possible."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from machd.engine.kv.slab_layout import (
    Layout,
    LayoutRule,
    LengthClasses,
    OneSlab,
    RowExtent,
)
from machd.engine.protocol.slab_size import class_columns, reserved_columns, slab_rows

_MAX_ROWS = 16
_LIMITS = st.integers(1, 5000)
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("joins"), st.integers(1, 5000), _LIMITS),
        st.tuples(st.just("leaves"), st.integers(0, _MAX_ROWS), st.just(0)),
        st.tuples(st.just("grow"), st.integers(1, 700), st.just(0)),
    ),
    min_size=1,
    max_size=40,
)


@dataclass
class _Batch:
    """Rows that join, grow and leave."""

    rule: LayoutRule
    rows: list[RowExtent] = field(default_factory=list)
    layout: Layout = ()
    next_row_id: int = 0

    def play(self, event: tuple[str, int, int]) -> Layout:
        """Play an event; returns the layout before it."""
        name, number, limit = event
        if name == "joins" and len(self.rows) < _MAX_ROWS:
            needed = min(number, limit)
            self.rows.append(RowExtent(self.next_row_id, needed, max(limit, needed)))
            self.next_row_id += 1
        elif name == "leaves" and len(self.rows) > 1:
            # As a decoder does it: the last row moves into the gap.
            gap = number % len(self.rows)
            last = self.rows.pop()
            if gap < len(self.rows):
                self.rows[gap] = last
        elif name == "grow":
            self.rows = [
                RowExtent(row.row_id, min(row.needed + number, row.limit), row.limit)
                for row in self.rows
            ]
        before = self.layout
        if self.rows:
            self.layout = self.rule.lay_out(before, self.rows)
        return before


def _places(layout: Layout) -> dict[int, tuple[int, int]]:
    return {
        row_id: (slab.number, place) for slab in layout for place, row_id in enumerate(slab.rows)
    }


def _columns(layout: Layout) -> int:
    return sum(slab.places * slab.columns for slab in layout)


@given(_EVENTS)
def test_each_row_has_one_place_that_is_long_enough(events: list[tuple[str, int, int]]) -> None:
    """By either rule, and no slab is empty or holds more rows than it has places."""
    for batch in (_Batch(LengthClasses()), _Batch(OneSlab(_MAX_ROWS))):
        for event in events:
            batch.play(event)
            every = [row_id for slab in batch.layout for row_id in slab.rows]
            assert sorted(every) == sorted(row.row_id for row in batch.rows)
            columns = {row_id: slab.columns for slab in batch.layout for row_id in slab.rows}
            assert all(columns[row.row_id] >= row.needed for row in batch.rows)
            assert all(0 < len(slab.rows) <= slab.places for slab in batch.layout)


@given(_EVENTS)
def test_length_classes_keep_within_the_reservation(events: list[tuple[str, int, int]]) -> None:
    """A row that joins finds at most a quarter more laid out than is reserved; rows that leave, twice as much."""
    batch = _Batch(LengthClasses())
    for event in events:
        rows = len(batch.rows)
        batch.play(event)
        reserved = reserved_columns(row.limit for row in batch.rows)
        most = 1.25 if len(batch.rows) > rows else 2
        assert _columns(batch.layout) <= most * reserved


def test_rows_that_take_turns_move_nobody() -> None:
    """A row that joins takes the place of one that left, and no array is laid out anew."""
    batch = _Batch(LengthClasses())
    for _ in range(_MAX_ROWS):
        batch.play(("joins", 150, 192))
    shapes = [slab.shape for slab in batch.layout]
    for turn in range(50):
        batch.play(("leaves", turn * 7, 0))
        batch.play(("joins", 150, 192))
        assert [slab.shape for slab in batch.layout] == shapes


@given(_EVENTS)
def test_one_slab_keeps_near_the_reservation(events: list[tuple[str, int, int]]) -> None:
    """One slab takes at most what is reserved, or twice that until rows that left make it worth a copy."""
    batch = _Batch(OneSlab(_MAX_ROWS))
    for event in events:
        batch.play(event)
        if batch.rows:
            limit = max(row.limit for row in batch.rows)
            assert _columns(batch.layout) <= 2 * slab_rows(len(batch.rows), _MAX_ROWS) * limit
            assert batch.layout[0].rows == tuple(row.row_id for row in batch.rows)


@given(_EVENTS)
def test_a_row_moves_only_to_grow_or_into_a_gap(events: list[tuple[str, int, int]]) -> None:
    """A join moves no row, a leave at most one, and growth the rows that grow and one for each of them."""
    batch = _Batch(LengthClasses())
    for event in events:
        before = _places(batch.play(event))
        after = _places(batch.layout)
        moved = [row_id for row_id, place in after.items() if before.get(row_id, place) != place]
        if event[0] == "joins":
            assert not moved
        elif event[0] == "leaves":
            assert len(moved) <= 1
        else:
            grown = [row_id for row_id in moved if before[row_id][0] != after[row_id][0]]
            assert len(moved) <= 2 * len(grown)


@given(st.integers(1, 100_000))
def test_a_class_is_at_most_half_as_long_again(tokens: int) -> None:
    """A row of 171 positions or more has at most 1.5 times as many columns, a shorter one 256."""
    columns = class_columns(tokens)
    assert tokens <= columns
    assert columns == 256 or columns < 1.5 * tokens + 1


def test_a_long_row_costs_short_ones_nothing() -> None:
    """A row of 1,500 tokens beside eight of 200 gets a slab of its own, and the others stay as they are."""
    batch = _Batch(LengthClasses())
    for _ in range(8):
        batch.play(("joins", 200, 250))
    before = batch.layout
    batch.play(("joins", 1500, 1536))

    assert batch.layout[: len(before)] == before
    assert [(slab.places, slab.columns) for slab in batch.layout] == [(10, 256), (1, 1536)]
