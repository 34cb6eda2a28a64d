"""Slabs hold each row's own keys and values, and those it shares, whatever rows join, grow, move and leave."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.small_classes import small_classes

from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.row_positions import RowPositions
from machd.engine.kv.slab_layout import LayoutRule, LengthClasses, OneSlab
from machd.engine.protocol.step import SharedPrefix

_HEADS, _HEAD_DIM = 2, 4

_each_rule = pytest.mark.parametrize(
    "rule", [LengthClasses, lambda: OneSlab(16)], ids=["classes", "one"]
)
_Rule = Callable[[], LayoutRule]


class _Slab:
    """One layer, with keys that hold their row's name and position."""

    def __init__(self, rule: LayoutRule) -> None:
        self.positions = RowPositions(rule)
        self.cache = SlabKv(self.positions)
        self.names: list[int] = []
        self._next_name = 1

    def join(self, length: int, limit: int, shared: SharedPrefix | None = None) -> None:
        """Add a row, which brings the prefix that it shares if no other row does."""
        is_new = shared is not None and shared not in self.positions.shared
        self.positions.append(length, limit, shared)
        self.names.append(self._next_name)
        self._next_name += 1
        base = 0 if shared is None else shared.tokens
        keys = _keys(self.names[-1], base, length - base)
        self.cache.place(len(self.names) - 1, [keys, -keys] if length else [])
        if shared is not None and is_new:
            keys = _keys(-shared.number, 0, base)
            self.cache.hold_prefix(shared.number, [keys, -keys])

    def keep(self, *order: int) -> None:
        """Keep these rows."""
        self.names = [self.names[row] for row in order]
        self.positions.select(order)
        self.cache.select(order)

    def step(self, *lengths: int) -> None:
        """Write a span a row, one token each unless given; what pads it is NaN."""
        starts = list(self.positions.lengths)
        self.positions.begin_pass(lengths or None)
        spans = lengths or (1,) * len(starts)
        longest = max(spans)
        keys = mx.concatenate(
            [
                mx.pad(
                    _keys(name, start, span),
                    [(0, 0), (0, 0), (0, longest - span), (0, 0)],
                    constant_values=mx.nan,
                )
                for name, start, span in zip(self.names, starts, spans, strict=True)
            ]
        )
        self.cache.write(keys, -keys)

    def check(self) -> None:
        """Check that every row holds its own keys, and that nothing behind those of other rows is NaN."""
        for row, (name, length) in enumerate(zip(self.names, self.positions.lengths, strict=True)):
            shared = self.positions.shared[row]
            expected = _keys(name, 0, length)
            if shared is not None:
                prefix, own = (
                    _keys(-shared.number, 0, shared.tokens),
                    expected[:, :, shared.tokens :],
                )
                expected = mx.concatenate([prefix, own], axis=2)
            for begin in (0, length // 2, length):
                for sign, array in zip((1, -1), self.cache.row_arrays(row, begin), strict=True):
                    assert mx.array_equal(
                        sign * array[:, :, : length - begin], expected[:, :, begin:]
                    )
        self.check_prefixes()

    def check_prefixes(self) -> None:
        """Check that prefixes are kept for the rows that share them, and for none else."""
        read = {one.number for one in self.positions.shared if one is not None}
        assert self.cache._prefixes.keys() == read


def _keys(name: int, begin: int, length: int) -> mx.array:
    """Keys [1, heads, length, head_dim] that differ by row and position."""
    positions = mx.arange(begin, begin + length, dtype=mx.float32)
    return mx.broadcast_to(
        (name * 10_000 + positions)[None, None, :, None], (1, _HEADS, length, _HEAD_DIM)
    )


_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("joins"), st.integers(0, 700)),
        st.tuples(st.just("shares"), st.integers(0, 700)),
        st.tuples(st.just("leaves"), st.integers(0, 15)),
        st.tuples(st.just("steps"), st.integers(1, 90)),
    ),
    min_size=1,
    max_size=20,
)


def _play(slab: _Slab, events: list[tuple[str, int]]) -> None:
    for name, number in events:
        if name == "joins" and len(slab.names) < 16:
            slab.join(number, number + 1200)
        elif name == "shares" and len(slab.names) < 16:
            has_classes = isinstance(slab.positions._rule, LengthClasses)
            shared = SharedPrefix(1 + number % 3, 3 + 40 * (number % 3)) if has_classes else None
            length = number + 84
            slab.join(length, length + 1200, shared)
        elif name == "leaves" and len(slab.names) > 1:
            last, gap = len(slab.names) - 1, number % len(slab.names)
            slab.keep(*(last if row == gap else row for row in range(last)))
        elif name == "steps" and slab.names:
            spans = [1 + (number * (row + 1)) % 7 for row in range(len(slab.names))]
            if max(slab.positions.lengths) + 7 < 1200:
                assert slab.positions.room_tokens() >= 7
                slab.step(*(spans if number % 2 else ()))
                slab.check()
    if slab.names:
        slab.step()
        slab.check()


@_each_rule
@settings(max_examples=60, deadline=None)
@given(events=_EVENTS)
def test_every_row_keeps_its_own_keys(rule: _Rule, events: list[tuple[str, int]]) -> None:
    """Through random histories of joins, leaves and passes, with spans of unequal length."""
    _play(_Slab(rule()), events)


def test_rows_that_outgrow_their_classes_in_one_step_keep_their_own_keys() -> None:
    """The shorter row takes the place that the longer one leaves, whose keys move first."""
    slab = _Slab(LengthClasses())
    for length in (384, 256):
        slab.join(length, 2000)
    slab.step()
    slab.check()


@settings(max_examples=300, deadline=None)
@given(events=_EVENTS)
def test_every_row_keeps_its_own_keys_in_classes_of_a_few_columns(
    events: list[tuple[str, int]],
) -> None:
    """Rows outgrow their classes in nearly every step, several of them in one."""
    with pytest.MonkeyPatch.context() as patch:
        small_classes(patch)
        _play(_Slab(LengthClasses()), [(name, number % 90) for name, number in events])


def test_a_place_that_is_taken_again_holds_nothing_of_the_former_row() -> None:
    """A NaN behind a row would reach it through a mask, as 0 x NaN is NaN."""
    slab = _Slab(LengthClasses())
    for _ in range(3):
        slab.join(200, 256)
    slab.step()
    slab.cache._slabs[0][0][1] = mx.nan
    slab.keep(0, 2)
    slab.join(5, 256)
    slab.step()
    slab.check()

    for row in range(3):
        assert not any(mx.isnan(array).any() for array in slab.cache.row_arrays(row))


def test_a_prefix_is_kept_until_its_last_row_leaves() -> None:
    """It is held once however many rows share it, and not at all without any."""
    slab = _Slab(LengthClasses())
    slab.join(40, 256)
    slab.step()
    alone_bytes = slab.cache.nbytes
    prefix = SharedPrefix(1, 500)
    prefix_bytes = sum(one.nbytes for one in (_keys(0, 0, 500),) * 2)
    for _ in range(3):
        slab.join(510, 700, prefix)
    slab.step()
    slab.check()
    assert slab.cache.nbytes <= 5 * alone_bytes + prefix_bytes, (
        "rows have places for what is theirs"
    )

    slab.keep(0, 3)
    slab.step()
    slab.check()
    slab.keep(0)
    slab.check()

    assert slab.cache.nbytes <= 2 * alone_bytes


def test_room_of_a_row_is_behind_its_prefix() -> None:
    """A row may grow as far as its class and its limit, both counted from the prefix's end."""
    slab = _Slab(LengthClasses())
    slab.join(510, 600, SharedPrefix(1, 500))
    assert slab.positions.room_tokens() == 256 - 10
    slab.keep(0)
    slab.join(510, 900, SharedPrefix(2, 500))
    slab.keep(1)
    assert slab.positions.room_tokens() == 400 - 10


def test_wiping_a_row_leaves_the_prefix_to_the_others() -> None:
    """A row's own columns are zeroed, also where all its positions are to be."""
    slab = _Slab(LengthClasses())
    for _ in range(2):
        slab.join(30, 256, SharedPrefix(1, 20))
    slab.step()
    slab.cache.wipe(0, 25)
    keys, _ = slab.cache.row_arrays(0)
    assert [bool(one) for one in keys[0, 0, 23:27, 0]] == [True, True, False, False]

    slab.cache.wipe(0)

    keys, _ = slab.cache.row_arrays(0)
    assert mx.array_equal(keys[:, :, :20], _keys(-1, 0, 20))
    assert not keys[:, :, 20:].any()
    slab.keep(1)
    slab.check()


@_each_rule
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_row_without_positions_keeps_its_place(rule: _Rule, rows: int) -> None:
    """A row without positions keeps its place when others leave, and in a new layout."""
    slab = _Slab(rule())
    for _ in range(rows):
        slab.join(5, 50)
    slab.step()
    slab.join(0, 50)
    slab.keep(rows)
    slab.step()
    slab.check()
    assert slab.positions.lengths == [1]


@_each_rule
def test_slab_of_rows_without_positions_is_made_by_the_first_step(rule: _Rule) -> None:
    """The slab of rows without positions is made by their first step."""
    slab = _Slab(rule())
    for _ in range(3):
        slab.join(0, 20)
    slab.keep(0, 2)
    slab.step()
    slab.check()


def test_one_slab_shrinks_when_rows_leave() -> None:
    """A slab that is far too large for the rows that are left frees its memory."""
    slab = _Slab(OneSlab(16))
    for number in range(16):
        slab.join(10 + 60 * number, 1000)
    slab.step()
    held_bytes = slab.cache.nbytes
    slab.keep(0)

    assert slab.cache.nbytes < held_bytes / 8
    slab.check()


def test_masks_show_a_row_its_own_columns() -> None:
    """Each slab reads as far as its longest row, and masks only where its rows differ."""
    positions = RowPositions(LengthClasses())
    for length in (10, 12, 400, 9):
        positions.append(length, 500)
    positions.begin_pass()

    short, long = positions.by_slab()

    assert [(one.rows, one.width, one.common_start) for one in (short, long)] == [
        (3, 13, None),
        (1, 401, 400),
    ]
    assert isinstance(short.mask, mx.array)
    assert short.mask[:, 0, 0].sum(axis=-1).tolist() == [11, 13, 10]
    assert long.mask is None
    assert positions.in_row_order([mx.array([0, 1, 3]), mx.array([2])]).tolist() == [0, 1, 2, 3]
