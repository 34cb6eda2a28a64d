"""Continuous batching: sequences join and leave a running batch at every step."""

from __future__ import annotations

from machd.scheduler.admission import Batching
from machd.scheduler.core import SchedulerCore
from machd.scheduler.events import DecodeMode
from machd.scheduler.pacing import PrefillPace
from machd.scheduler.shape import CoreShape
from machd.scheduler.waiting import QueueLimits

__all__ = ["ContinuousScheduler"]


class ContinuousScheduler(SchedulerCore):
    """As many slots as ``max_b``, a KV budget, and one decode for identical sequences."""

    def __init__(self, limits: QueueLimits, batching: Batching) -> None:
        """Start idle."""
        super().__init__(
            limits,
            CoreShape(
                DecodeMode.BATCHED,
                slot_count=batching.max_b,
                window_s=batching.window_s,
                coalesce=batching.coalesce,
                kv=batching.kv,
            ),
            PrefillPace(beside_decode=batching.prefill_chunk_tokens),
        )
