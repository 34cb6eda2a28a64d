"""The next step as a pure function: chunks, decode rows and what is to be freed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sequence_samples import sequence_of

from machd.engine.protocol import DecodeRow, PrefillChunk, StepPlan
from machd.scheduler.plan import plan_step
from machd.scheduler.slots import Slots


@given(prompt_tokens=st.integers(1, 200), chunk_tokens=st.integers(1, 64))
def test_chunks_cover_the_prompt_once_and_in_order(prompt_tokens: int, chunk_tokens: int) -> None:
    """Put together, the chunks are the prompt; only the last one says so; none is too long."""
    slots = Slots(1)
    sequence = sequence_of(prompt_tokens=prompt_tokens)
    slots.occupy(sequence, now_s=0.0)
    chunks: list[PrefillChunk] = []
    while not sequence.is_prefilled:
        plan = plan_step(slots, prefill_chunk_tokens=chunk_tokens)
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
        slots.occupy(sequence, now_s=0.0)
    sequences[1].prefilled_tokens = 4

    plan = plan_step(slots, prefill_chunk_tokens=3)

    assert [chunk.slot_index for chunk in plan.prefill] == [0, 2]
    assert plan.decode == (DecodeRow(slot_index=1, has_next=True),)
    assert plan.prefill_tokens == 6


def test_the_last_token_wants_no_next() -> None:
    """``has_next`` is false exactly when the token being planned is the last one allowed."""
    slots = Slots(1)
    sequence = sequence_of(max_tokens=3)
    slots.occupy(sequence, now_s=0.0)
    sequence.prefilled_tokens = 4
    wants = []
    for _ in range(3):
        wants += [row.has_next for row in plan_step(slots, prefill_chunk_tokens=8).decode]
        sequence.count_token()

    assert wants == [True, True, False]


def test_left_slots_are_freed_by_the_plan() -> None:
    """A plan frees what was left, though nobody runs any more."""
    slots = Slots(2)
    slots.occupy(sequence_of("a"), now_s=0.0)
    slots.leave(0)

    plan = plan_step(slots, prefill_chunk_tokens=8)

    assert plan == StepPlan(release=(0,))
    assert not plan.is_empty


def test_nothing_to_do_is_an_empty_plan() -> None:
    """An idle batch plans nothing."""
    assert plan_step(Slots(3), prefill_chunk_tokens=8).is_empty


def test_planning_changes_nothing() -> None:
    """The same state gives the same plan, as often as it is asked."""
    slots = Slots(2)
    slots.occupy(sequence_of("a", prompt_tokens=9), now_s=0.0)
    slots.occupy(sequence_of("b"), now_s=0.0)
    slots.leave(1)

    plans = [plan_step(slots, prefill_chunk_tokens=2) for _ in range(3)]

    assert plans[0] == plans[1] == plans[2]
    assert slots.released == (1,)
