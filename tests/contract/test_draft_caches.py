"""A row whose rejected drafts were rolled back continues as one that never had any.

Rows of every kind of cache read texts, alone and in a batch, and what they say is compared with what
they say token by token. At the end faults are planted, and the comparison has to notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.drafted_rows import LANES, DraftedRows, PlainTexts, Text, make_caches
from support.engines.parity import NOISE
from support.engines.tiny_engines import loaded
from support.engines.tiny_models import EVERY_RUN, TinyKind, each_kind
from support.every_run import sampled

from machd.engine.kernels.fused_llama import fuse_layers
from machd.engine.kv.formats import kv_format_named
from machd.engine.kv.layers.cache_state import StateCheckpoint
from machd.engine.kv.layers.slab import ColumnCheckpoint, SlabKv
from machd.engine.kv.layers.window import WindowCheckpoint, WindowKv
from machd.engine.kv.row_positions import RowPositions

_STEP_NATS = 0.05
"""A number at the border of two quantisation steps may be rounded either way (test_quantised_parity)."""

_FORMATS = ("none", "affine8", "affine4", "turboquant")
_WINDOW = 8
"""Of the tiny models that have one."""

_KINDS = each_kind()
_EACH_LANE = pytest.mark.parametrize("lane", LANES)
_EACH_KIND_AND_LANE = pytest.mark.parametrize(
    ("lane", "kind"),
    sampled(
        list(product(LANES, TinyKind)),
        [
            *((lane, TinyKind.STANDARD) for lane in LANES),
            ("alone", TinyKind.HYBRID_GDN),
            ("batch", TinyKind.NESTED_ROTATING),
        ],
    ),
)

_HAS_STATE = {
    TinyKind.HYBRID_GDN,
    TinyKind.HYBRID,
    TinyKind.NESTED,
    TinyKind.NESTED_ROTATING,
}


@cache
def _plain(kind: TinyKind, name: str = "none") -> PlainTexts:
    model = loaded(kind).model
    fuse_layers(model)  # as an engine does on the CPU
    return PlainTexts(model, kv_format_named(name))


def _rows(kind: TinyKind, lane: str, name: str = "none") -> DraftedRows:
    return DraftedRows(_plain(kind, name), make_caches(lane))


def _noise(name: str) -> float:
    return NOISE if name == "none" else _STEP_NATS


def _kinds_and_formats() -> list[object]:
    """All pairs; `make test` runs some kinds in one format, and each format on one kind."""
    return [
        pytest.param(
            kind,
            name,
            marks=()
            if kind is TinyKind.STANDARD or (name == "none" and kind in EVERY_RUN)
            else pytest.mark.long,
        )
        for kind in TinyKind
        for name in _FORMATS
    ]


@pytest.mark.parametrize(("kind", "name"), _kinds_and_formats())
@_EACH_LANE
def test_rejected_drafts_leave_nothing(kind: TinyKind, name: str, lane: str) -> None:
    """Twenty rollbacks in a row leave nothing, with all, some or no drafts rejected."""
    rows = _rows(kind, lane, name)
    rows.join(Text(1, 13))
    rows.steps(3)

    for cycle in range(20):
        rows.draft([cycle % 4], [(cycle * 3) % 5])
        if cycle % 7 == 6:
            rows.steps(2)
    rows.steps(5)

    assert rows.worst < _noise(name)
    is_always_done = kind not in _HAS_STATE
    assert all(rows.was_done) is is_always_done
    # Recurrent state alone has to be computed again, and only if a draft was rejected.
    assert rows.was_done == [is_always_done or not (cycle * 3) % 5 for cycle in range(20)]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (TinyKind.ROTATING, 2 * _WINDOW + 3),
        *(
            pytest.param(kind, wrong, marks=pytest.mark.long)
            for kind, wrong in (
                *((TinyKind.ROTATING, one) for one in (1, 4, _WINDOW)),
                *((TinyKind.NESTED_ROTATING, one) for one in (1, 4, _WINDOW, 2 * _WINDOW + 3)),
            )
        ),
    ],
)
@_EACH_LANE
def test_a_window_is_right_at_every_turn_of_its_ring(kind: TinyKind, lane: str, wrong: int) -> None:
    """A window rolls back not yet full, just full and anywhere in its ring; with more drafts than columns."""
    for steps in range(2 * _WINDOW + 2):
        rows = _rows(kind, lane)
        rows.join(Text(2, 3, tokens=48))
        rows.steps(steps)
        rows.draft([steps % 3], [wrong])
        rows.steps(_WINDOW + 2)

        assert rows.worst < NOISE


@_EACH_KIND_AND_LANE
def test_a_pass_that_is_taken_back_whole_was_never_there(kind: TinyKind, lane: str) -> None:
    """Drafts of one token and of several, one after the other and between others, in every cache."""
    rows = _rows(kind, lane)
    rows.join(Text(3, 6))
    for cycle in range(12):
        rows.draft_in_vain([1 + cycle % 5])
        rows.draft_in_vain([1])
        rows.steps(cycle % 3)
        rows.draft([1], [2])
    rows.steps(_WINDOW)

    assert rows.worst < NOISE


@_EACH_KIND_AND_LANE
def test_row_may_begin_with_drafts(kind: TinyKind, lane: str) -> None:
    """A prompt of one token leaves caches without arrays, which a pass is taken out of again."""
    for count in (0, 1, 3):
        rows = _rows(kind, lane)
        rows.join(Text(4, 0))
        rows.draft_in_vain([1 + count])
        rows.draft([0], [count])
        rows.draft([2], [count])
        rows.steps(12)

        assert rows.worst < NOISE


@_EACH_KIND_AND_LANE
@pytest.mark.parametrize(
    "prompts",
    [
        # The first pass crosses the border with rejected drafts, and with accepted ones.
        pytest.param((253, 255), id="at the border"),
        pytest.param((250, 254, 256), id="around it", marks=pytest.mark.long),
    ],
)
def test_caches_that_grow_are_right(kind: TinyKind, lane: str, prompts: Sequence[int]) -> None:
    """Drafts that cross the 256 positions of an allocation are rolled back."""
    for prompt_tokens in prompts:
        rows = _rows(kind, lane)
        rows.join(Text(5, prompt_tokens, tokens=280))
        rows.draft([1], [4])
        rows.draft([0], [9])
        rows.draft([2], [1])
        rows.steps(4)

        assert rows.worst < NOISE


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=pytest.mark.long if one in ("affine8", "affine4") else ())
        for one in _FORMATS
    ],
)
def test_rows_of_a_batch_roll_back_each_its_own(name: str) -> None:
    """Rows roll back different numbers of drafts, while rows join and leave."""
    rows = _rows(TinyKind.STANDARD, "batch", name)
    for seed, length in enumerate((40, 7, 22)):
        rows.join(Text(10 + seed, length))
    rows.steps(1)

    for cycle in range(30):
        if cycle == 8:
            rows.join(Text(20, 3))
        if cycle == 14:
            rows.keep(3, 1, 2)
        if cycle == 20:
            rows.keep(1)
            rows.join(Text(21, 50))
        count = len(rows.rows)
        right = [(cycle + 2 * row) % 4 for row in range(count)]
        wrong = [(cycle * 3 + row) % 5 for row in range(count)]
        rows.draft(right, wrong)
        if cycle % 5 == 4:
            rows.steps(1)
    rows.draft_in_vain([1 + row for row in range(len(rows.rows))])
    rows.steps(2)

    assert rows.worst < _noise(name)
    assert all(rows.was_done)


@_KINDS
@pytest.mark.parametrize(
    ("others", "every_steps"),
    [
        ((31, 4), (0, _WINDOW - 1, 13)),
        pytest.param((31, 4), (1, 3, _WINDOW), marks=pytest.mark.long),
        pytest.param((60,), (0, 1, 3, _WINDOW - 1, _WINDOW, 13), marks=pytest.mark.long),
        pytest.param((2,), (0, 1, 3, _WINDOW - 1, _WINDOW, 13), marks=pytest.mark.long),
    ],
)
def test_a_row_that_others_have_left_drafts(
    kind: TinyKind, others: Sequence[int], every_steps: Sequence[int]
) -> None:
    """Longer and shorter ones leave padding, turned rings and widened histories behind."""
    for steps in every_steps:
        rows = _rows(kind, "batch")
        for seed, length in enumerate(others):
            rows.join(Text(30 + seed, length))
        rows.join(Text(35, 5))
        rows.steps(steps)
        rows.keep(len(others))

        rows.draft([1], [3])
        rows.draft([0], [2])
        rows.steps(3)
        rows.join(Text(36, 17))
        rows.steps(_WINDOW + 3)
        rows.keep(0)
        rows.draft([2], [5])
        rows.steps(3)

        assert rows.worst < NOISE


@_KINDS
def test_a_row_joins_one_that_has_just_drafted(kind: TinyKind) -> None:
    """A window has more columns than its size then, and the next pass brings them together."""
    for right, wrong, length in ((0, 6, 2), (5, 0, 30), (3, 2, 9), (2, 1, 0)):
        rows = _rows(kind, "batch")
        rows.join(Text(37, 20))
        rows.draft([right], [wrong])
        rows.join(Text(38, length))
        rows.steps(_WINDOW + 4)
        rows.keep(1)
        rows.draft([right], [wrong])
        rows.steps(3)

        assert rows.worst < NOISE


_MOVES = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 9), st.just(0)),
    st.tuples(st.just("draft"), st.integers(0, 5), st.integers(0, 11)),
    st.tuples(st.just("draft"), st.integers(0, 5), st.integers(0, 3)),
    st.tuples(st.just("vain"), st.integers(1, 12), st.just(0)),
    st.tuples(st.just("join"), st.integers(0, 40), st.integers(40, 43)),
    st.tuples(st.just("leave"), st.integers(0, 4), st.just(0)),
)


@_EACH_KIND_AND_LANE
@pytest.mark.parametrize("max_examples", [3, pytest.param(30, marks=pytest.mark.long)])
def test_no_history_leaves_a_draft_behind(kind: TinyKind, lane: str, max_examples: int) -> None:
    """A row is right whatever the passes are, and whichever rows join and leave between them."""

    @settings(max_examples=max_examples, derandomize=True)
    @given(moves=st.lists(_MOVES, min_size=6, max_size=24), prompt_tokens=st.integers(0, 20))
    def _holds(moves: list[tuple[str, int, int]], prompt_tokens: int) -> None:
        rows = _rows(kind, lane)
        rows.join(Text(9, prompt_tokens))
        for move in moves:
            _play(rows, lane, *move)
            left = [row.text.tokens - row.length for row in rows.rows]
            if min(left) < 40:
                break

        rows.steps(_WINDOW + 2)

        assert rows.worst < NOISE

    _holds()


def _play(rows: DraftedRows, lane: str, move: str, first: int, second: int) -> None:
    """One move, as far as the caches allow it."""
    count = len(rows.rows)
    if move == "step":
        rows.steps(first)
    elif move == "join":
        if lane == "batch" and count < 4:
            rows.join(Text(second, first))
    elif move == "leave":
        if count > 1:
            rows.keep(*(row for row in range(count) if row != first % count))
    elif not rows.caches.can_roll_back:
        assert count > 1, "a row alone takes them"
    elif move == "draft":
        rows.draft(
            [(first + row) % 6 for row in range(count)],
            [(second + 2 * row) % 12 for row in range(count)],
        )
    else:
        rows.draft_in_vain([1 + (first + row) % 12 for row in range(count)])


# --- faults that the comparison has to notice ---------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]


def _a_list_that_models_write_into(patch: pytest.MonkeyPatch) -> None:
    """The arrays are the checkpoint's own, the list that they are in is the cache's."""

    def shared(self: Any, cache: Any) -> None:
        self._cache, self._state = cache, cache.state

    patch.setattr(StateCheckpoint, "__init__", shared)


def _a_batch_without_ends(patch: pytest.MonkeyPatch) -> None:
    """Rows are shorter by what is known of them, and begin where the device had them."""

    def cut(self: RowPositions, counts: Sequence[int]) -> None:
        self.lengths = [one - count for one, count in zip(self.lengths, counts, strict=True)]

    patch.setattr(RowPositions, "cut", cut)


def _columns_behind_the_end(patch: pytest.MonkeyPatch) -> None:
    """A window's last columns stay, behind the index."""

    def cut(self: Any, count: int) -> bool:
        keys, values, offset, keep, max_size, index = self._cache.state
        self._cache.state = (keys, values, offset - count, keep, max_size, index - count)
        return True

    patch.setattr(WindowCheckpoint, "cut", cut)


def _positions_that_go_on(patch: pytest.MonkeyPatch) -> None:
    """A window loses its columns and keeps its count."""
    right = WindowCheckpoint.cut

    def cut(self: Any, count: int) -> bool:
        offset = self._cache.offset
        is_done = right(self, count)
        self._cache.offset = offset
        return is_done

    patch.setattr(WindowCheckpoint, "cut", cut)


def _state_that_is_not_restored(patch: pytest.MonkeyPatch) -> None:
    """State keeps the rejected drafts after a rollback."""
    patch.setattr(StateCheckpoint, "restore", lambda *_: None)


def _columns_that_are_not_restored(patch: pytest.MonkeyPatch) -> None:
    """Recurrent state is restored, and standard caches beside it are not."""
    patch.setattr(ColumnCheckpoint, "restore", lambda *_: None)
    patch.setattr(RowPositions, "cut", lambda *_: None)


def _state_that_passes_for_cut(patch: pytest.MonkeyPatch) -> None:
    """State claims that the rejected drafts are removed from it."""
    patch.setattr(StateCheckpoint, "cut", lambda *_: True)


def _a_window_short_of_a_column(patch: pytest.MonkeyPatch) -> None:
    """A column too many is dropped, which shows while the window sees it."""

    def cut(self: Any, count: int) -> bool:
        keys, values, offset, keep, max_size, index = self._cache.state
        kept = index - count
        keys, values = keys[..., 1:kept, :], values[..., 1:kept, :]
        self._cache.state = (keys, values, offset - count, keep, max_size, kept - 1)
        return True

    patch.setattr(WindowCheckpoint, "cut", cut)


def _a_ring_that_is_never_wider(patch: pytest.MonkeyPatch) -> None:
    """A pass of several tokens overwrites what its first token would still see."""
    patch.setattr(WindowKv, "_lengthen_period", lambda *_: None)


_FAULTS: list[tuple[Plant, TinyKind, str]] = [
    (_a_list_that_models_write_into, TinyKind.HYBRID, "alone"),
    (_a_list_that_models_write_into, TinyKind.HYBRID_GDN, "batch"),
    (_a_batch_without_ends, TinyKind.STANDARD, "batch"),
    (_columns_behind_the_end, TinyKind.ROTATING, "alone"),
    (_a_batch_without_ends, TinyKind.ROTATING, "batch"),
    (_a_ring_that_is_never_wider, TinyKind.ROTATING, "batch"),
    (_positions_that_go_on, TinyKind.ROTATING, "alone"),
    (_state_that_is_not_restored, TinyKind.HYBRID, "alone"),
    (_state_that_is_not_restored, TinyKind.NESTED, "batch"),
    (_columns_that_are_not_restored, TinyKind.HYBRID_GDN, "alone"),
    (_columns_that_are_not_restored, TinyKind.HYBRID_GDN, "batch"),
    (_state_that_passes_for_cut, TinyKind.HYBRID_GDN, "alone"),
    (_state_that_passes_for_cut, TinyKind.NESTED, "batch"),
    (_a_window_short_of_a_column, TinyKind.ROTATING, "alone"),
]


@pytest.mark.parametrize(
    ("plant", "kind", "lane"),
    _FAULTS,
    ids=[f"{plant.__name__.strip('_')}-{kind}-{lane}" for plant, kind, lane in _FAULTS],
)
def test_faults_are_noticed(
    plant: Plant, kind: TinyKind, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is far beyond noise, or the pass fails."""
    plant(monkeypatch)

    assert _worst_of_a_history(kind, lane) > 10 * NOISE


def _worst_of_a_history(kind: TinyKind, lane: str) -> float:
    rows = _rows(kind, lane)
    rows.join(Text(6, 11, tokens=100))
    try:
        for cycle in range(8):
            rows.steps(cycle % 3)
            rows.draft_in_vain([1])
            rows.draft([cycle % 2], [1 + cycle % 3])
        rows.steps(_WINDOW)
    except ValueError:
        return float("inf")
    return rows.worst


@pytest.mark.parametrize("steps", [1, 4])
def test_row_that_is_left_alone_takes_drafts(steps: int) -> None:
    """A window's row may draft once longer rows have left, whatever their rings did."""
    rows = _rows(TinyKind.ROTATING, "batch")
    rows.join(Text(30, 60))
    rows.join(Text(35, 2))
    rows.steps(steps)
    rows.keep(1)

    rows.draft([3], [1])
    rows.steps(_WINDOW)

    assert rows.worst < NOISE


def test_nan_behind_a_rows_end_is_wiped() -> None:
    """A NaN behind a row's end reaches no later token once wiped; nothing before it changes."""
    rows = _rows(TinyKind.STANDARD, "batch")
    rows.join(Text(50, 30))
    rows.join(Text(51, 9))
    rows.draft([1, 2], [4, 3])
    slabs = [layer for layer in rows.caches.caches if isinstance(layer, SlabKv)]
    assert slabs
    for slab in slabs:
        for array in slab.arrays:
            array[1, :, rows.rows[1].length :] = mx.nan

    rows.caches.wipe(1, rows.rows[1].length)
    rows.steps(3)
    rows.draft([1, 0], [0, 2])

    assert rows.worst < NOISE
