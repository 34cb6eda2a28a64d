"""The next step as a pure function of who sits where."""

from __future__ import annotations

from machd.engine.protocol import DecodeRow, StepPlan
from machd.scheduler.sequence import Sequence
from machd.scheduler.slots import Slots

__all__ = ["plan_step"]


def plan_step(slots: Slots, *, prefill_chunk_tokens: int) -> StepPlan:
    """Free what was left, prefill a chunk of each unfinished prompt, decode every other row."""
    running = tuple(slots)
    return StepPlan(
        release=slots.released,
        prefill=tuple(
            sequence.next_chunk(prefill_chunk_tokens)
            for sequence in running
            if not sequence.is_prefilled
        ),
        decode=tuple(_decode_row(sequence) for sequence in running if sequence.is_prefilled),
    )


def _decode_row(sequence: Sequence) -> DecodeRow:
    assert sequence.slot_index is not None, "a running sequence has a slot"
    return DecodeRow(
        slot_index=sequence.slot_index,
        has_next=sequence.completion_tokens + 1 < sequence.request.max_tokens,
    )
