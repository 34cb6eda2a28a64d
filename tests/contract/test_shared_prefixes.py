"""A row that shares its prefix with others has the tokens that it has alone, whatever rows join, fail and leave.

Rows are played on an engine as a scheduler would, with prefixes that plans name. At the end faults are
planted where a prefix is read, kept and dropped, and the comparison has to notice each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.block_rows import ASKED, BlockRows
from support.engines.constrained_rows import schema_grammar
from support.engines.cpu_layers import for_cpu_layers
from support.engines.drafted_scripts import DraftedScripts, always, say
from support.engines.parity import differences
from support.engines.small_classes import small_classes
from support.engines.tiny_engines import alone, loaded
from support.engines.tiny_models import TinyKind

from machd.engine.assembly import make_engine
from machd.engine.kv import batch_lane
from machd.engine.kv.lane_kv import PrefilledRow
from machd.engine.kv.layers.batched_cache import PositionedKv
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.row_positions import RowPositions
from machd.engine.protocol.step import DecodeRow, Lane, SampledToken, SharedPrefix, StepPlan
from machd.engine.step.prompts.prefill import Prefill
from machd_probes.play import GREEDY, Join
from machd_probes.scripts import LENGTHS, MIXED, Script, random_prompt, scripts

pytestmark = for_cpu_layers

TOKENS = 14
BEGINNING, OTHER = random_prompt(24, 8), random_prompt(24, 9)
WHOLE, PART, ELSEWHERE = SharedPrefix(1, 24), SharedPrefix(2, 16), SharedPrefix(3, 24)
PROMPTS = [BEGINNING + random_prompt(length, number) for number, length in enumerate(LENGTHS)]
SCRIPTS = scripts(PROMPTS, TOKENS)

_AHEAD = pytest.mark.parametrize("looks_ahead", [False, True], ids=["in step", "looking ahead"])


def _sharing(script: Script) -> Script:
    """Let every row share as much as it can."""
    return replace(script, joins=tuple(_shares(one, WHOLE) for one in script.joins))


def _shares(join: Join, prefix: SharedPrefix | None) -> Join:
    if prefix is None or join.lane is not Lane.BATCH or len(join.prompt) <= prefix.tokens:
        return join
    return replace(join, shared=prefix)


def _mixed() -> Script:
    """Rows of three prefixes, and some that share nothing, which come and go."""
    joins = SCRIPTS["mixed parameters"].joins + SCRIPTS["early leaves"].joins
    prefixes = (WHOLE, PART, None, ELSEWHERE)
    rows = []
    for number, join in enumerate(joins):
        prefix = prefixes[number % 4]
        prompt = OTHER + join.prompt[24:] if prefix is ELSEWHERE else join.prompt
        rows.append(_shares(replace(join, prompt=prompt), prefix))
    return Script(tuple(rows), slots=6)


def _differences(script: Script, *, looks_ahead: bool = False) -> list[str]:
    engine = make_engine(loaded(TinyKind.STANDARD), looks_ahead=looks_ahead)
    assert engine.model.shares_prefixes
    together = script.play(engine)
    assert engine.memory().kv_used_bytes == 0, (
        "rows that left hold no memory, nor do their prefixes"
    )
    return alone(TinyKind.STANDARD).differences(script, together)


@pytest.mark.parametrize(
    ("name", "looks_ahead"),
    [
        pytest.param(
            name,
            looks_ahead,
            id=f"{name}-{'looking ahead' if looks_ahead else 'in step'}",
            marks=() if number % 2 == looks_ahead else pytest.mark.long,
        )
        for looks_ahead in (False, True)
        for number, name in enumerate(SCRIPTS)
    ],
)
def test_sharing_changes_nothing(name: str, looks_ahead: bool) -> None:  # noqa: FBT001
    """Every row says what it says alone, to the token, its log-probabilities within noise."""
    assert _differences(_sharing(SCRIPTS[name]), looks_ahead=looks_ahead) == []


@_AHEAD
def test_rows_of_several_prefixes_change_nothing(looks_ahead: bool) -> None:  # noqa: FBT001
    """Rows that share different prefixes, and rows that share none, have slabs of their own."""
    assert _differences(_mixed(), looks_ahead=looks_ahead) == []


@pytest.mark.parametrize("name", ["seven", "early leaves", "chunked prefill", "slots taken again"])
def test_rows_that_share_outgrow_their_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row moves with the columns that are its own."""
    small_classes(monkeypatch)
    assert _differences(_sharing(SCRIPTS[name])) == []


def test_rows_of_several_prefixes_outgrow_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moves within the slabs of its prefix."""
    small_classes(monkeypatch)
    assert _differences(_mixed()) == []


@_AHEAD
@pytest.mark.parametrize("name", ["seven", "early leaves", "slots taken again", "mixed parameters"])
def test_drafts_of_rows_that_share_are_rolled_back(name: str, looks_ahead: bool) -> None:  # noqa: FBT001
    """Rejected drafts leave a row's own columns, and the prefix is as it was."""
    stage = DraftedScripts(TinyKind.STANDARD, looks_ahead=looks_ahead)

    assert stage.differences(_sharing(SCRIPTS[name]), always) == []
    assert stage.engine.accepted_tokens > 0


@_AHEAD
def test_drafts_of_rows_of_several_prefixes_are_rolled_back(looks_ahead: bool) -> None:  # noqa: FBT001
    """So it is where each prefix has slabs of its own."""
    stage = DraftedScripts(TinyKind.STANDARD, looks_ahead=looks_ahead)

    assert stage.differences(_mixed(), always) == []
    assert stage.engine.accepted_tokens > 0


@_AHEAD
def test_grammars_hold_for_rows_that_share(looks_ahead: bool) -> None:  # noqa: FBT001
    """Masked and forced tokens are those of the same rows with columns of their own."""
    engine = make_engine(loaded(TinyKind.STANDARD), looks_ahead=looks_ahead)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    samplings = [
        replace(one, grammar=schema_grammar(engine, {**schema, "additionalProperties": False}))
        for one in (GREEDY, MIXED[1])
    ]
    joins = [
        Join(prompt, TOKENS, sampling)
        for prompt, sampling in zip(PROMPTS, [*samplings, GREEDY, MIXED[2]], strict=False)
    ]

    plain, shared = say(engine, joins), say(engine, [_shares(one, WHOLE) for one in joins])

    assert not plain.faults
    assert not shared.faults
    assert plain.token_ids == shared.token_ids


_JOINS = st.builds(
    lambda prefix, length, seed, tokens, at_step, chunk_tokens, leaves_after, sampling, lane: (
        _shares(
            Join(
                (OTHER if prefix is ELSEWHERE else BEGINNING) + random_prompt(length, seed),
                tokens,
                MIXED[sampling],
                at_step,
                chunk_tokens,
                min(leaves_after, tokens),
                lane,
            ),
            prefix,
        )
    ),
    prefix=st.sampled_from([WHOLE, WHOLE, PART, ELSEWHERE, None]),
    length=st.integers(1, 40),
    seed=st.integers(0, 5),
    tokens=st.integers(1, 16),
    at_step=st.integers(0, 20),
    chunk_tokens=st.sampled_from([5, 9, 64, 64]),
    leaves_after=st.integers(1, 40),
    sampling=st.integers(0, len(MIXED) - 1),
    lane=st.sampled_from([Lane.BATCH] * 6 + [Lane.SERIAL]),
)


@_AHEAD
@pytest.mark.parametrize("max_examples", [6, pytest.param(60, marks=pytest.mark.long)])
def test_no_history_changes_a_row_that_shares(
    looks_ahead: bool,  # noqa: FBT001
    max_examples: int,
) -> None:
    """Whatever the others share, and whenever they join, leave and outgrow their classes."""

    @settings(max_examples=max_examples, derandomize=True)
    @given(joins=st.lists(_JOINS, min_size=2, max_size=8), slots=st.integers(2, 7))
    def _holds(joins: list[Join], slots: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            small_classes(patch)
            assert _differences(Script(tuple(joins), slots), looks_ahead=looks_ahead) == []

    _holds()


def test_blocks_of_a_row_that_shares_are_those_of_any_row() -> None:
    """A block is copied from the prefix, from the row's own columns, and from both."""
    prompt = PROMPTS[4]
    rows = BlockRows(make_engine(loaded(TinyKind.STANDARD)))
    expected = rows.alone(prompt, TOKENS)
    for slot_index in (1, 2):
        chunk = replace(rows.chunk(prompt, 0, len(prompt), slot_index), shared=WHOLE)
        rows.run(StepPlan(prefill=(chunk,), decode=(DecodeRow(1),) if slot_index == 2 else ()))
    stops = (10, 30, len(prompt) - 1)
    starts = (0, *stops[:-1])
    blocks = [
        rows.store(2, start, stop).block_id for start, stop in zip(starts, stops, strict=True)
    ]
    rows.release(1, 2)

    said = rows.reusing(prompt, stops[-1], blocks, TOKENS)

    assert differences(expected, said, ASKED) == []


def test_a_hit_shares_its_beginning() -> None:
    """Rows opened from blocks hold what they share once, and say what they say alone."""
    rows = BlockRows(make_engine(loaded(TinyKind.STANDARD)))
    blocks = rows.prompt_blocks(BEGINNING, (16, 24), slot_index=7)
    rows.release(7)
    held_bytes: list[int] = []
    for shared in (None, WHOLE):
        said: dict[int, list[SampledToken]] = {slot_index: [] for slot_index in range(4)}
        for step in range(12):
            chunks = [
                rows.chunk(prompt, 24, len(prompt), slot_index, block_ids=blocks)
                for slot_index, prompt in enumerate(PROMPTS[:4])
                if slot_index == step
            ]
            plan = StepPlan(
                prefill=tuple(replace(one, shared=shared) for one in chunks),
                decode=tuple(DecodeRow(one) for one in range(min(step, 4))),
            )
            for slot_index, tokens in rows.tokens(plan).items():
                said[slot_index] += tokens
        held_bytes.append(rows.engine.memory().kv_used_bytes)
        rows.release(*range(4))
        for slot_index, prompt in enumerate(PROMPTS[:4]):
            expected = alone(TinyKind.STANDARD).tokens(Join(prompt, TOKENS, ASKED))
            tokens = said[slot_index]
            assert differences(expected[: len(tokens)], tokens, ASKED) == []

    # Rows of one class have as many columns with a prefix as without: it is all that is added.
    bytes_per_token = rows.engine.model.cache.bytes_per_token
    assert held_bytes[1] - held_bytes[0] == WHOLE.tokens * bytes_per_token


def _spoil(patch: pytest.MonkeyPatch, prompt: Sequence[int], position: int) -> None:
    """Make a position of a prompt's keys and values NaN before its row joins."""
    right = Prefill.finish

    def finish(prefill: Prefill) -> PrefilledRow:
        if tuple(prefill.prompt) == tuple(prompt):
            for cache in prefill.caches:
                cache.keys[:, :, position] = mx.nan
                cache.values[:, :, position] = mx.nan
        return right(prefill)

    patch.setattr(Prefill, "finish", finish)


def _faulty_row_differences(patch: pytest.MonkeyPatch, position: int) -> list[str]:
    """Let the first of four rows have a NaN, and return where the others said something else than alone."""
    _spoil(patch, PROMPTS[0], position)
    engine = make_engine(loaded(TinyKind.STANDARD))
    joins = [_shares(Join(prompt, TOKENS, ASKED), WHOLE) for prompt in PROMPTS[:4]]
    said = say(engine, joins, draft_tokens=0)
    assert 0 in said.faults
    found = [f"row {one} failed" for one in said.faults if one]
    for join, tokens in zip(joins[1:], said.tokens[1:], strict=True):
        found += differences(alone(TinyKind.STANDARD).tokens(join), tokens, ASKED)
    return found


@pytest.mark.parametrize("position", [3, WHOLE.tokens])
def test_a_faulty_row_costs_the_others_nothing(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in its own columns stays there, and a prefix with a NaN is not shared."""
    assert _faulty_row_differences(monkeypatch, position) == []


Plant = Callable[[pytest.MonkeyPatch], None]


def the_prefix_lacks_its_end(patch: pytest.MonkeyPatch) -> None:
    """A block of the prefix is not read."""
    right = SlabKv.prefix
    patch.setattr(
        SlabKv,
        "prefix",
        lambda self, rows: (found := right(self, rows)) and [one[:, :, :-8] for one in found],
    )


def the_base_is_a_block_late(patch: pytest.MonkeyPatch) -> None:
    """A row's own columns begin behind positions that no array has."""
    right = batch_lane.BatchLaneKv.join

    def join(self: batch_lane.BatchLaneKv, row: PrefilledRow) -> None:
        if row.shared is not None and row.length >= row.shared.tokens + 4:
            late = SharedPrefix(row.shared.number, row.shared.tokens + 4)
            right(self, replace(row, shared=late))
            for slab in self.caches:
                slab._prefixes[late.number] = [
                    one[:, :, : row.shared.tokens] for one in slab._prefixes[late.number]
                ]
        else:
            right(self, row)

    patch.setattr(batch_lane.BatchLaneKv, "join", join)


def the_prefix_goes_with_its_first_row(patch: pytest.MonkeyPatch) -> None:
    """When any row leaves, what the others share is given back and holds something else."""
    right = SlabKv.select

    def select(self: SlabKv, order: Sequence[int]) -> None:
        right(self, order)
        for number, arrays in self._prefixes.items():
            self._prefixes[number] = [mx.zeros_like(one) for one in arrays]

    patch.setattr(SlabKv, "select", select)


def positions_begin_behind_the_prefix(patch: pytest.MonkeyPatch) -> None:
    """Rows are rotated by their columns."""
    own: property = vars(PositionedKv)["offset"]

    def offset(cache: SlabKv) -> mx.array:
        offsets: mx.array = own.__get__(cache)
        bases = [cache._positions.base(row) for row in range(cache.rows)]
        return offsets - mx.array(bases, dtype=mx.int32)

    patch.setattr(SlabKv, "offset", property(offset))


def all_rows_share_the_newest_prefix(patch: pytest.MonkeyPatch) -> None:
    """A prefix is not told from another of the same length."""
    right = SlabKv.hold_prefix

    def hold(self: SlabKv, number: int, arrays: Sequence[mx.array]) -> None:
        right(self, number, arrays)
        for other, held in self._prefixes.items():
            if held[0].shape == arrays[0].shape:
                self._prefixes[other] = arrays

    patch.setattr(SlabKv, "hold_prefix", hold)


def a_moved_row_takes_too_few_columns(patch: pytest.MonkeyPatch) -> None:
    """A row that moves leaves its last columns behind."""
    right = RowPositions.filled
    patch.setattr(RowPositions, "filled", lambda self, row_id: max(0, right(self, row_id) - 3))


@pytest.mark.parametrize(
    "plant",
    [
        the_prefix_lacks_its_end,
        the_base_is_a_block_late,
        the_prefix_goes_with_its_first_row,
        positions_begin_behind_the_prefix,
        all_rows_share_the_newest_prefix,
        a_moved_row_takes_too_few_columns,
    ],
)
def test_a_planted_fault_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of ``test_rows_of_several_prefixes_outgrow_their_classes`` fails for each fault."""
    small_classes(monkeypatch)
    plant(monkeypatch)

    assert _differences(_mixed()) != []


def test_a_prefix_with_a_nan_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, a NaN of the row that brings the prefix reaches the others."""
    monkeypatch.setattr(
        batch_lane,
        "_copies_without_nan",
        lambda row, tokens: [
            (one.keys[:, :, :tokens], one.values[:, :, :tokens]) for one in row.caches
        ],
    )

    assert _faulty_row_differences(monkeypatch, 3) != []
