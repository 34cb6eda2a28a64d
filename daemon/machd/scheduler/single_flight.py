"""One generation at a time; everyone else waits in a bounded queue."""

from __future__ import annotations

from machd.scheduler.core import SchedulerCore
from machd.scheduler.drafting import NO_DRAFTS, DraftPolicy
from machd.scheduler.events import DecodeMode
from machd.scheduler.pacing import PREFILL_CHUNK_TOKENS, PrefillPace
from machd.scheduler.shape import Arrangement, CoreShape
from machd.scheduler.waiting import QueueLimits

__all__ = ["PREFILL_CHUNK_TOKENS", "SingleFlightScheduler", "single_flight"]


def single_flight(
    limits: QueueLimits,
    drafts: DraftPolicy = NO_DRAFTS,
    *,
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
) -> Arrangement:
    """The safe default: one slot, first come, first served, nothing shared."""
    return Arrangement(
        limits,
        CoreShape(
            DecodeMode.SINGLE, slot_count=1, window_s=0.0, coalesce=False, kv=None, drafts=drafts
        ),
        PrefillPace(beside_decode=None, alone=prefill_chunk_tokens),
    )


class SingleFlightScheduler(SchedulerCore):
    """A scheduler that begins as :func:`single_flight` says."""

    def __init__(
        self, limits: QueueLimits, *, prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS
    ) -> None:
        """Start idle."""
        super().__init__(single_flight(limits, prefill_chunk_tokens=prefill_chunk_tokens))
