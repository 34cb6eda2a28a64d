"""The next step as a pure function of who sits where."""

from __future__ import annotations

from machd.engine.protocol import Lane, PrefillChunk, StepPlan
from machd.scheduler.decode import Decode
from machd.scheduler.pacing import PrefillPace
from machd.scheduler.slots import Slots

__all__ = ["plan_step"]


def plan_step(slots: Slots, pace: PrefillPace, *, turn: Lane) -> StepPlan:
    """Free what was left, prefill what the pace allows, decode every row of one lane.

    Args:
        slots: Who runs.
        pace: How many prompt tokens may share the step.
        turn: The lane that decodes if both have rows to.
    """
    burst_tokens = pace.burst_tokens(one.completion_tokens for one in slots if one.is_prefilled)
    if burst := _whole_prompts(slots, burst_tokens):
        return StepPlan(slots.released, burst)
    lane, rows = _decoding(slots, turn)
    budget_tokens = pace.prefill_tokens(lane, len(rows))
    return StepPlan(
        slots.released,
        _chunks(slots, budget_tokens),
        tuple(decode.next_row() for decode in rows),
    )


def _decoding(slots: Slots, turn: Lane) -> tuple[Lane | None, list[Decode]]:
    ready = [decode for decode in slots if decode.is_prefilled]
    if not ready:
        return None, []
    lane = turn if any(decode.lane is turn for decode in ready) else ready[0].lane
    return lane, [decode for decode in ready if decode.lane is lane]


def _whole_prompts(slots: Slots, budget_tokens: int) -> tuple[PrefillChunk, ...]:
    """Prompts that nothing is computed of yet, as many as fit whole."""
    chunks: list[PrefillChunk] = []
    for decode in slots.in_order_of_admission:
        if decode.prefilled_tokens == 0 and decode.prompt_tokens <= budget_tokens:
            chunks.append(decode.next_chunk(decode.prompt_tokens))
            budget_tokens -= decode.prompt_tokens
    return tuple(chunks)


def _chunks(slots: Slots, budget_tokens: int) -> tuple[PrefillChunk, ...]:
    """First admitted, first served: what one prompt leaves of the budget goes to the next."""
    chunks: list[PrefillChunk] = []
    for decode in slots.in_order_of_admission:
        if budget_tokens > 0 and not decode.is_prefilled:
            chunk = decode.next_chunk(budget_tokens)
            chunks.append(chunk)
            budget_tokens -= len(chunk.token_ids)
    return tuple(chunks)
