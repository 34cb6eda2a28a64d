"""What tells one scheduling mode from the other."""

from __future__ import annotations

from dataclasses import dataclass

from machd.scheduler.admission import KvBudget
from machd.scheduler.drafting import NO_DRAFTS, DraftPolicy
from machd.scheduler.events import DecodeMode
from machd.scheduler.pacing import PrefillPace
from machd.scheduler.waiting import QueueLimits

__all__ = ["Arrangement", "CoreShape"]


@dataclass(frozen=True, slots=True)
class CoreShape:
    """The scheduler's configuration, whatever settings it came from.

    Attributes:
        window_s: How long an idle scheduler waits for company before it starts.
        coalesce: Whether identical sequences share a decode.
        kv: What running decodes may take together; None where they run alone, without limit.
        drafts: When tokens are guessed ahead.
    """

    mode: DecodeMode
    slot_count: int
    window_s: float
    coalesce: bool
    kv: KvBudget | None
    drafts: DraftPolicy = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class Arrangement:
    """All that a scheduler is made of; a running one can be given another at an idle moment."""

    limits: QueueLimits
    shape: CoreShape
    pace: PrefillPace
