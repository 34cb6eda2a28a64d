"""The next step as a pure function: chunks, decode rows and what is to be freed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.schedulers.sequence_samples import sequence_of

from machd.engine.protocol.step import DecodeRow, Lane, PrefillChunk, StepPlan
from machd.scheduler.pacing import StepPace
from machd.scheduler.plan import plan_step
from machd.scheduler.slots import Slots


def _plan(slots: Slots, chunk_tokens: int, *, turn: Lane = Lane.BATCH) -> StepPlan:
    """With the same number of prompt tokens in every step."""
    return plan_step(slots, StepPace(beside_decode=chunk_tokens, alone=chunk_tokens), turn=turn)


@given(prompt_tokens=st.integers(1, 200), chunk_tokens=st.integers(1, 64))
def test_chunks_cover_the_prompt_once_and_in_order(prompt_tokens: int, chunk_tokens: int) -> None:
    """Put together, the chunks are the prompt; only the last one says so; none is too long."""
    slots = Slots(1)
    sequence = sequence_of(prompt_tokens=prompt_tokens)
    slots.occupy(sequence, Lane.BATCH, now_s=0.0)
    chunks: list[PrefillChunk] = []
    while not sequence.is_prefilled:
        plan = _plan(slots, chunk_tokens)
        assert plan.decode == ()
        (chunk,) = plan.prefill
        assert chunk.start == sequence.prefilled_tokens
        chunks.append(chunk)
        sequence.prefilled_tokens += len(chunk.token_ids)

    assert sum((chunk.token_ids for chunk in chunks), ()) == sequence.request.prompt
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert max(len(chunk.token_ids) for chunk in chunks) <= chunk_tokens
    assert len(chunks) == -(-prompt_tokens // chunk_tokens), "no chunk is shorter than it must be"
    assert {chunk.reserved_tokens for chunk in chunks} == {sequence.reserved_tokens}


def test_prefilled_rows_decode_and_the_others_prefill() -> None:
    """Every running sequence is in the plan exactly once, under its slot."""
    slots = Slots(4)
    sequences = [sequence_of(name) for name in "abc"]
    for sequence in sequences:
        slots.occupy(sequence, Lane.BATCH, now_s=0.0)
    sequences[1].prefilled_tokens = 4

    plan = _plan(slots, 8)

    assert [chunk.slot_index for chunk in plan.prefill] == [0, 2]
    assert plan.decode == (DecodeRow(slot_index=1),)
    assert plan.prefill_tokens == 8


def test_prompts_share_a_step_in_the_order_of_their_places() -> None:
    """The first prompt's rest of the budget goes to the next, until it is spent."""
    slots = Slots(4)
    for name in "abcd":
        slots.occupy(sequence_of(name), Lane.BATCH, now_s=0.0)
    slots.leave(0)
    slots.occupy(sequence_of("e"), Lane.BATCH, now_s=0.0)

    plan = _plan(slots, 10)

    sizes = [(chunk.slot_index, len(chunk.token_ids), chunk.is_last) for chunk in plan.prefill]
    assert sizes == [(1, 4, True), (2, 4, True), (3, 2, False)]


def test_one_lane_decodes_at_a_time_and_whole() -> None:
    """All rows of the batch decode or none; the turn decides between two ready lanes."""
    slots = Slots(4)
    for name, lane in [("a", Lane.BATCH), ("b", Lane.SERIAL), ("c", Lane.BATCH)]:
        sequence = sequence_of(name)
        slots.occupy(sequence, lane, now_s=0.0)
        sequence.prefilled_tokens = 4

    def decoding(turn: Lane) -> list[int]:
        return [row.slot_index for row in _plan(slots, 8, turn=turn).decode]

    assert decoding(Lane.BATCH) == [0, 2]
    assert decoding(Lane.SERIAL) == [1]
    slots.leave(1)
    assert decoding(Lane.SERIAL) == [0, 2], "a lane without rows has no turn"


def test_a_chunk_names_its_lane() -> None:
    """The engine learns with the opening chunk where the row will decode."""
    slots = Slots(2)
    slots.occupy(sequence_of("a"), Lane.SERIAL, now_s=0.0)
    slots.occupy(sequence_of("b"), Lane.BATCH, now_s=0.0)
    assert [chunk.lane for chunk in _plan(slots, 8).prefill] == [Lane.SERIAL, Lane.BATCH]


def test_left_slots_are_freed_by_the_plan() -> None:
    """A plan frees released slots even if no sequence runs."""
    slots = Slots(2)
    slots.occupy(sequence_of("a"), Lane.BATCH, now_s=0.0)
    slots.leave(0)

    plan = _plan(slots, 8)

    assert plan == StepPlan(release=(0,))
    assert not plan.is_empty


def test_nothing_to_do_is_an_empty_plan() -> None:
    """An idle batch plans nothing."""
    assert _plan(Slots(3), 8).is_empty


def test_planning_changes_nothing() -> None:
    """The same state gives the same plan, as often as it is asked."""
    slots = Slots(2)
    slots.occupy(sequence_of("a", prompt_tokens=9), Lane.BATCH, now_s=0.0)
    slots.occupy(sequence_of("b"), Lane.BATCH, now_s=0.0)
    slots.leave(1)

    plans = [_plan(slots, 2) for _ in range(3)]

    assert plans[0] == plans[1] == plans[2]
    assert slots.released == (1,)


def test_a_burst_of_prompts_is_prefilled_before_its_first_rows_go_on() -> None:
    """Rows that have just begun stand still for whole prompts; rows with a rhythm do not."""
    slots = Slots(4)
    sequences = [sequence_of(name) for name in "abc"]
    for sequence in sequences:
        slots.occupy(sequence, Lane.BATCH, now_s=0.0)
    sequences[0].prefilled_tokens = 4
    pace = StepPace(beside_decode=None)

    sequences[0].completion_token_ids = [1] * 7
    burst = plan_step(slots, pace, turn=Lane.BATCH)
    assert [(chunk.slot_index, chunk.is_last) for chunk in burst.prefill] == [(1, True), (2, True)]
    assert burst.decode == ()

    sequences[0].completion_token_ids = [1] * 8
    assert plan_step(slots, pace, turn=Lane.BATCH).decode == (DecodeRow(slot_index=0),)


def test_a_long_prompt_is_no_burst() -> None:
    """A prompt that does not fit into one chunk waits its turn even beside rows that just began."""
    slots = Slots(4)
    young = sequence_of("a")
    slots.occupy(young, Lane.BATCH, now_s=0.0)
    young.prefilled_tokens = 4
    slots.occupy(sequence_of("b", prompt_tokens=513), Lane.BATCH, now_s=0.0)
    plan = plan_step(slots, StepPace(beside_decode=None), turn=Lane.BATCH)
    assert plan.decode == (DecodeRow(slot_index=0),)


def _measured_pace(token_s: float) -> StepPace:
    """One that has seen what a prompt token takes."""
    pace = StepPace(beside_decode=None)
    pace.observe(None, 0, prefill_tokens=100, duration_s=100 * token_s)
    return pace


def test_a_short_prompt_passes_a_long_one_that_came_just_before() -> None:
    """A short prompt passes a long one that arrived before it by less than the long one's duration."""
    slots = Slots(3)
    slots.occupy(sequence_of(number=0, prompt_tokens=2000, arrived_s=0.0), Lane.BATCH, now_s=0.0)
    slots.occupy(sequence_of(number=1, prompt_tokens=9, arrived_s=15.0), Lane.BATCH, now_s=15.0)
    slots.occupy(sequence_of(number=2, prompt_tokens=9, arrived_s=25.0), Lane.BATCH, now_s=25.0)

    first = plan_step(slots, _measured_pace(0.01), turn=Lane.BATCH)
    assert [chunk.slot_index for chunk in first.prefill] == [1], "a burst of its own"

    slots.leave(1)
    second = plan_step(slots, _measured_pace(0.01), turn=Lane.BATCH)
    assert [chunk.slot_index for chunk in second.prefill] == [0], "then it is the long one's turn"


def test_burst_does_not_pass_the_first_prompt() -> None:
    """However many short prompts come for as long as it is computed, a long one gets there."""
    slots = Slots(2)
    pace = _measured_pace(0.01)
    long = sequence_of(number=0, prompt_tokens=2000, arrived_s=0.0)
    slots.occupy(long, Lane.BATCH, now_s=0.0)
    now_s, steps = 0.0, 0
    while not long.is_prefilled:
        steps += 1
        assert steps < 100, "the long prompt starves"
        now_s += 1.0
        short = sequence_of(number=steps, prompt_tokens=30, arrived_s=now_s)
        slots.occupy(short, Lane.BATCH, now_s=now_s)
        for chunk in plan_step(slots, pace, turn=Lane.BATCH).prefill:
            sequence = slots.at(chunk.slot_index)
            assert sequence is not None
            sequence.prefilled_tokens += len(chunk.token_ids)
        slots.leave(1)
