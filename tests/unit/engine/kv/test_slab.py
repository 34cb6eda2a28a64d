"""The slab's size is bounded by its rows' KV reservations, whatever rows were there before."""

from __future__ import annotations

import mlx.core as mx
import pytest

from machd.engine.kv import row_positions
from machd.engine.kv.row_positions import RowPositions
from machd.engine.kv.slab import SlabCache
from machd.engine.protocol.step import slab_rows

_HEADS, _HEAD_DIM = 2, 4


class _Slab:
    """One layer, with keys that hold their row's name."""

    def __init__(self, max_rows: int) -> None:
        self.positions = RowPositions()
        self.cache = SlabCache(self.positions, max_rows)
        self.max_rows = max_rows
        self.names: list[float] = []

    def join(self, length: int, limit: int) -> None:
        """Add a row, named by a number."""
        name = float(len(self.names) + 1 + sum(self.names))
        self.positions.append(length, limit)
        if length:
            keys = mx.full((1, _HEADS, length, _HEAD_DIM), name)
            self.cache.place(len(self.names), [keys, -keys])
        else:
            self.cache.place(len(self.names), [])
        self.names.append(name)

    def keep(self, *order: int) -> None:
        """Keep these rows."""
        self.positions.keep(order)
        self.cache.keep(order)
        self.names = [self.names[row] for row in order]

    def step(self) -> None:
        """Write one token a row."""
        self.positions.open_pass()
        keys = mx.array(self.names)[:, None, None, None]
        keys = mx.broadcast_to(keys, (len(self.names), _HEADS, 1, _HEAD_DIM))
        self.cache.update_and_fetch(keys, -keys)

    def check(self) -> None:
        """Check that every row holds its own keys, and the slab little more than was reserved."""
        keys, values = self.cache.keys, self.cache.values
        assert keys is not None
        assert values is not None
        for row, (name, length) in enumerate(zip(self.names, self.positions.lengths, strict=True)):
            assert mx.all(keys[row, :, :length] == name)
            assert mx.all(values[row, :, :length] == -name)
        promised = slab_rows(len(self.names), self.max_rows) * max(self.positions.limits)
        assert keys.shape[0] * keys.shape[2] <= 2 * promised


def test_slab_stays_within_reservations_of_joining_rows() -> None:
    """The array never exceeds the sum of the reservations while rows only join."""
    slab = _Slab(max_rows=8)
    for number in range(8):
        slab.join(5 + 40 * number, 30 + 41 * number)
        slab.step()
        slab.check()
        assert slab.cache.keys is not None
        rows, _, columns, _ = slab.cache.keys.shape
        assert rows * columns <= slab_rows(number + 1, 8) * max(slab.positions.limits)


def test_slab_is_not_widened_by_a_row_that_left() -> None:
    """Short rows after a long one get short rows of the slab."""
    slab = _Slab(max_rows=8)
    slab.join(1000, 1020)
    slab.join(300, 312)
    slab.step()
    slab.keep(1)
    for _ in range(6):
        slab.join(300, 312)
        slab.step()
        slab.check()


def test_slab_shrinks_when_rows_leave() -> None:
    """The slab shrinks as rows leave a wide batch one by one."""
    slab = _Slab(max_rows=16)
    for number in range(16):
        slab.join(10 + 60 * number, 1000)
    slab.step()
    while len(slab.names) > 1:
        slab.keep(*range(len(slab.names) - 1))
        slab.step()
        slab.check()


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_row_without_positions_keeps_its_place(rows: int) -> None:
    """A row without positions keeps its place when others leave, and in a new layout."""
    slab = _Slab(max_rows=16)
    for _ in range(rows):
        slab.join(5, 50)
    slab.step()
    slab.join(0, 50)
    slab.keep(rows)
    slab.step()
    slab.check()
    assert slab.positions.lengths == [1]


def test_slab_of_rows_without_positions_is_made_by_the_first_step() -> None:
    """The slab of rows without positions is made by their first step."""
    slab = _Slab(max_rows=4)
    for _ in range(3):
        slab.join(0, 20)
    slab.keep(0, 2)
    slab.step()
    slab.check()


def test_row_groups_join_rows_of_about_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row among short ones is a group of its own; each mask shows a row its own columns."""
    monkeypatch.setattr(row_positions, "_GROUP_COLUMNS", 100)
    positions = RowPositions()
    for length in (10, 12, 400, 9, 9):
        positions.append(length, 500)
    positions.open_pass()

    row_groups = positions.row_groups()

    assert [(group.begin, group.end, group.width) for group in row_groups] == [
        (0, 2, 13),
        (2, 3, 401),
        (3, 5, 10),
    ]
    assert row_groups[0].mask is not None
    assert row_groups[0].mask[:, 0, 0].sum(axis=-1).tolist() == [11, 13]
    assert row_groups[1].mask is row_groups[2].mask is None


def test_row_groups_ignore_short_differences() -> None:
    """Rows whose padding costs less than another call form one group."""
    positions = RowPositions()
    for length in (100, 150, 200):
        positions.append(length, 500)
    positions.open_pass()
    assert [(group.begin, group.end, group.width) for group in positions.row_groups()] == [
        (0, 3, 201)
    ]
