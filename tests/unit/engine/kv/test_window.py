"""Windows of a batch hold each row's own last keys, whichever rows join, leave, go round and roll back."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machd.engine.kv.lane_kv import JoiningRow
from machd.engine.kv.layers import window
from machd.engine.kv.layers.window import WindowKv
from machd.engine.kv.row_positions import RowPositions
from machd.engine.kv.slab_layout import OneSlab

_HEADS, _HEAD_DIM, _MAX_ROWS = 2, 4, 16
_WINDOWS = (1, 2, 8, 40)


class _Window:
    """One layer, with keys that hold their row's name and position."""

    def __init__(self, window_tokens: int) -> None:
        self.window_tokens = window_tokens
        self.positions = RowPositions(OneSlab(_MAX_ROWS))
        self.slab = WindowKv(self.positions, window_tokens, _MAX_ROWS)
        self.names: list[int] = []
        self.grows_early = False
        self._next_name = 1

    def join(self, length: int, limit: int) -> None:
        """Add a row."""
        self.positions.append(length, limit)
        self.names.append(self._next_name)
        self._next_name += 1
        keys = _keys(self.names[-1], max(0, length - self.window_tokens), length)
        self.slab.place(len(self.names) - 1, [keys, -keys] if length else [])

    def keep(self, *order: int) -> None:
        """Keep these rows."""
        self.names = [self.names[row] for row in order]
        self.positions.select(order)
        self.slab.select(order)

    def step(self, *lengths: int) -> None:
        """Write a span a row, one token each unless given, and check what each token sees."""
        starts = list(self.positions.lengths)
        self.positions.begin_pass(lengths or None)
        if self.grows_early:
            self.slab.grow_early()
        spans = lengths or (1,) * len(starts)
        longest = max(spans)
        keys = mx.concatenate(
            [
                mx.pad(
                    _keys(name, start, start + span),
                    [(0, 0), (0, 0), (0, longest - span), (0, 0)],
                    constant_values=-1,
                )
                for name, start, span in zip(self.names, starts, spans, strict=True)
            ]
        )
        mask = self.slab.make_mask(longest)
        assert self.slab.offset.tolist() == starts
        held, negated = self.slab.update_and_fetch(keys, -keys)
        assert mx.array_equal(held, -negated)
        assert self.slab.offset.tolist() == self.positions.lengths
        for row, (name, start, span) in enumerate(zip(self.names, starts, spans, strict=True)):
            for token in range(span):
                seen = [
                    key
                    for key, sees in zip(
                        _ints(held[row, 0, :, 0]), _ints(mask[row, 0, token]), strict=True
                    )
                    if sees
                ]
                own = start + token
                oldest = max(0, own - self.window_tokens + 1)
                assert sorted(seen) == [_key(name, one) for one in range(oldest, own + 1)]

    def check(self) -> None:
        """Check that a copy of each row holds its last keys, in order of position."""
        for row, (name, length) in enumerate(zip(self.names, self.positions.lengths, strict=True)):
            keys, values, offset, sinks, size, index = self.slab.window_state(row)
            if keys is None or values is None:
                assert not length
                continue
            # What a pass of several tokens overwrites is what no later token sees.
            oldest = max(0, length - self.window_tokens + 1)
            expected = _keys(name, oldest, length)
            assert mx.array_equal(keys[:, :, keys.shape[2] - expected.shape[2] :], expected)
            assert mx.array_equal(keys, -values)
            assert (offset, sinks, size) == (length, 0, self.window_tokens)
            assert index == keys.shape[2] == min(length, self.window_tokens)


def _key(name: int, position: int) -> int:
    return name * 10_000 + position


def _keys(name: int, begin: int, end: int) -> mx.array:
    """Keys [1, heads, end - begin, head_dim] that differ by row and position."""
    positions = mx.arange(begin, end, dtype=mx.float32)
    return mx.broadcast_to(
        (name * 10_000 + positions)[None, None, :, None], (1, _HEADS, end - begin, _HEAD_DIM)
    )


def _ints(array: mx.array) -> list[int]:
    """Return the numbers of an array of one axis."""
    return [int(number) for number in np.array(array)]


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("joins"), st.integers(0, 90)),
        st.tuples(st.just("leaves"), st.integers(0, 15)),
        st.tuples(st.just("steps"), st.integers(1, 90)),
        st.tuples(st.just("drafts"), st.integers(1, 90)),
    ),
    min_size=1,
    max_size=24,
)


def _play(window: _Window, events: list[tuple[str, int]]) -> None:
    for name, number in events:
        rows = len(window.names)
        if name == "joins" and rows < _MAX_ROWS:
            window.join(number, number + 400)
        elif name == "leaves" and rows > 1:
            last, gap = rows - 1, number % rows
            window.keep(*(last if row == gap else row for row in range(last)))
        elif name in {"steps", "drafts"} and rows:
            window.grows_early = number % 3 == 0
            spans = [1 + (number * (row + 1)) % 7 for row in range(rows)]
            window.step(*(spans if name == "drafts" or number % 2 else ()))
            if name == "drafts":
                window.positions.cut(
                    [(number + row) % (span + 1) for row, span in enumerate(spans)]
                )
            window.check()
    if window.names:
        window.step()
        window.check()


@pytest.mark.parametrize("window_tokens", _WINDOWS)
@settings(max_examples=40, deadline=None)
@given(events=_EVENTS)
def test_every_row_sees_its_own_window(window_tokens: int, events: list[tuple[str, int]]) -> None:
    """Each token sees its row's last positions and nothing else, through random histories."""
    _play(_Window(window_tokens), events)


def test_window_of_many_columns_grows_with_its_rows() -> None:
    """A window larger than its rows has columns for their positions, and grows before it goes round."""
    window = _Window(1000)
    window.join(250, 5000)
    window.join(3, 5000)
    assert window.slab.state[0].shape[2] < 512
    for _ in range(10):
        window.step()
    assert 260 < window.slab.state[0].shape[2] < 1000
    window.join(1300, 5000)
    window.step()
    window.check()
    assert window.slab.state[0].shape[2] == 1000


def test_window_never_has_more_columns_than_rows_may_use() -> None:
    """Rows that may have few positions get few columns, whatever the window."""
    window = _Window(1000)
    window.join(20, 30)
    window.step()

    assert window.slab.state[0].shape[2] == 30


def test_row_that_joins_or_leaves_moves_no_other_row() -> None:
    """A row that joins is written into a spare place; a row that leaves is replaced by the last one."""
    window = _Window(8)
    window.grows_early = True
    for length in (30, 4, 12, 9, 21):
        window.join(length, 100)
    window.step()
    before = [mx.array(array) for array in window.slab.state]
    mx.eval(before)

    window.join(50, 100)
    window.keep(0, 5, 2, 3, 4)

    for old, new in zip(before, window.slab.state, strict=True):
        assert new.shape == old.shape
        for place in (0, 2, 3, 4):
            assert mx.array_equal(new[place], old[place])
    window.step()
    window.check()


def test_window_shrinks_when_rows_leave() -> None:
    """Arrays that are far too large for the rows that are left free their memory."""
    window = _Window(40)
    for number in range(16):
        window.join(10 + 9 * number, 400)
    window.step()
    held_bytes = window.slab.nbytes

    window.keep(7)

    assert window.slab.nbytes == held_bytes / 8, "with a place to spare"
    window.step()
    window.check()


def test_ring_that_is_turned_for_drafts_keeps_its_rows() -> None:
    """Rows that have gone round keep their positions when the period becomes longer, and go on in it."""
    window = _Window(8)
    for length in (50, 31, 4):
        window.join(length, 400)
    window.step()
    for spans in ((5, 2, 1), (1, 1, 1), (40, 33, 7), (1, 1, 1)):
        window.step(*spans)
        window.check()


def test_window_grows_ahead_of_need() -> None:
    """Places and columns are there before the row and the position that need them."""
    window = _Window(1000)
    for _ in range(3):
        window.join(500, 5000)
    window.grows_early = True
    for _ in range(200):
        window.step()
        window.check()
        places, _, columns, _ = window.slab.state[0].shape
        assert places > 3
        assert columns > window.positions.width
    while window.slab.state[0].shape[2] < 1000:
        window.step()
    assert not window.slab.grow_early()


def test_layers_that_grow_in_different_passes_share_masks() -> None:
    """A mask of one layer fits another one that has grown earlier or later."""
    window = _Window(600)
    other = WindowKv(window.positions, 600, _MAX_ROWS)
    window.join(250, 5000)
    window.join(3, 5000)
    for row, name in enumerate(window.names):
        keys = _keys(name, 0, window.positions.lengths[row])
        other.place(row, [keys, -keys])
    for step in range(500):
        window.step()
        if step == 2:
            other.grow_early()
        mask = other.make_mask(1)
        assert mx.array_equal(mask, window.slab.make_mask(1))
        last = [one - 1 for one in window.positions.lengths]
        new = mx.concatenate(
            [_keys(name, one, one + 1) for name, one in zip(window.names, last, strict=True)]
        )
        held, _ = other.update_and_fetch(new, -new)
        assert mx.array_equal(
            mx.where(mask[:, :, 0, :, None], held, 0),
            mx.where(mask[:, :, 0, :, None], window.slab.keys_and_values()[0], 0),
        )


@pytest.mark.parametrize("length", [0, 3, 8, 30])
def test_place_that_is_taken_again_holds_nothing_of_the_former_row(length: int) -> None:
    """A NaN that the former row left would reach the new one through a mask, as 0 x NaN is NaN."""
    window = _Window(8)
    for _ in range(3):
        window.join(20, 100)
    window.step()
    for array in window.slab.state:
        array[2] = mx.nan
    window.keep(0, 1)
    window.join(length, 100)

    assert not any(mx.isnan(array).any() for array in window.slab.state)
    window.step()


@pytest.mark.parametrize("length", [3, 8, 30])
def test_wipe_leaves_what_later_tokens_see(length: int) -> None:
    """Positions from one on are zeros after a wipe, the window before them and other rows are not."""
    window = _Window(8)
    for _ in range(2):
        window.join(length, 100)
    window.step(5, 5)
    others = mx.array(window.slab.state[0][0])
    window.positions.cut([5, 5])

    window.slab.wipe(1, length)

    written = {one - _key(2, 0) for one in _ints(window.slab.state[0][1, 0, :, 0]) if one}
    assert written == set(range(max(0, length - 7), length))
    assert mx.array_equal(window.slab.state[0][0], others)
    window.step()
    window.slab.wipe(0)
    assert not window.slab.state[0][0].any()


@pytest.mark.parametrize("narrow", [1, 3])
def test_mask_of_fewer_positions_than_the_window_has(narrow: int) -> None:
    """A model that asks for less than the cache keeps sees so many positions."""
    window = _Window(8)
    for length in (2, 11):
        window.join(length, 100)
    window.positions.begin_pass()

    mask = window.slab.make_mask(1, window_size=narrow)

    assert mask[:, 0, 0].sum(axis=-1).tolist() == [narrow, narrow]


def test_growth_is_what_the_next_pass_allocates() -> None:
    """The estimate for rows that join and for longer passes is the size of the new arrays, else 0."""
    window = _Window(40)
    assert window.slab.new_array_bytes([JoiningRow(9, 100)], 1) == 0, (
        "nothing is known of its arrays yet"
    )
    for _ in range(2):
        window.join(39, 400)
    window.step()
    cases: list[tuple[Callable[[], None], list[JoiningRow], int]] = [
        (window.step, [], 1),
        (lambda: window.step(9, 9), [], 9),
        (lambda: window.join(50, 400), [JoiningRow(50, 400)], 1),
        (lambda: window.join(50, 400), [JoiningRow(50, 400)], 1),
    ]
    for happens, joining, tokens in cases:
        held_bytes, grown_bytes = window.slab.nbytes, window.slab.new_array_bytes(joining, tokens)
        happens()
        assert window.slab.nbytes == (grown_bytes or held_bytes)


def _keys_go_to_the_first_row(patch: pytest.MonkeyPatch) -> None:
    """All rows write where the first one does."""
    right = WindowKv._write

    def write(self: WindowKv, array: mx.array, new: mx.array) -> None:
        start = self._positions.start
        self._positions.start = mx.broadcast_to(start[:1], start.shape)
        right(self, array, new)
        self._positions.start = start

    patch.setattr(WindowKv, "_write", write)


def _rings_are_not_turned(patch: pytest.MonkeyPatch) -> None:
    """A row's columns stay where they are in a ring of another width."""
    patch.setattr(
        WindowKv,
        "_turned",
        lambda self, array, *_: window._extended(array, self._period, 2),
    )


def _rows_are_in_order_of_position(patch: pytest.MonkeyPatch) -> None:
    """A row that joins lies from column 0 on."""
    right = WindowKv._ring
    patch.setattr(WindowKv, "_ring", lambda self, array, _: right(self, array, array.shape[2]))


def _rings_are_never_wider(patch: pytest.MonkeyPatch) -> None:
    """A pass of several tokens has as many columns as one of one token."""
    patch.setattr(WindowKv, "_lengthen_period", lambda *_: None)


@pytest.mark.parametrize(
    "plant",
    [
        _keys_go_to_the_first_row,
        _rings_are_not_turned,
        _rows_are_in_order_of_position,
        _rings_are_never_wider,
    ],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_faults_are_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history with a row that has gone round, drafts and a row that leaves fails with each fault."""
    history = [
        ("joins", 9),
        ("joins", 13),
        ("steps", 2),
        ("drafts", 5),
        ("leaves", 0),
        ("steps", 3),
    ]
    _play(_Window(8), history)
    plant(monkeypatch)

    with pytest.raises(AssertionError):
        _play(_Window(8), history)
