"""Continuous batching: sequences join and leave a running batch at every step."""

from __future__ import annotations

from machd.scheduler.admission import Batching
from machd.scheduler.core import SchedulerCore
from machd.scheduler.drafting import NO_DRAFTS, DraftPolicy
from machd.scheduler.events import DecodeMode
from machd.scheduler.pacing import PrefillPace
from machd.scheduler.shape import Arrangement, CoreShape
from machd.scheduler.waiting import QueueLimits

__all__ = ["ContinuousScheduler", "continuous"]


def continuous(
    limits: QueueLimits, batching: Batching, drafts: DraftPolicy = NO_DRAFTS
) -> Arrangement:
    """As many slots as ``max_b``, a KV budget, and one decode for identical sequences."""
    shape = CoreShape(
        DecodeMode.BATCHED,
        slot_count=batching.max_b,
        window_s=batching.window_s,
        coalesce=batching.coalesce,
        kv=batching.kv,
        drafts=drafts,
    )
    return Arrangement(limits, shape, PrefillPace(beside_decode=batching.prefill_chunk_tokens))


class ContinuousScheduler(SchedulerCore):
    """A scheduler that begins as :func:`continuous` says."""

    def __init__(self, limits: QueueLimits, batching: Batching) -> None:
        """Start idle."""
        super().__init__(continuous(limits, batching))
