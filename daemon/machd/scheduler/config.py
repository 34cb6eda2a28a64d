"""The config of a scheduler, and the two that settings ask for: continuous batching and single flight."""

from __future__ import annotations

from dataclasses import dataclass, replace

from machd.scheduler.admission import Batching, KvBudget, Promised
from machd.scheduler.events import DecodeMode
from machd.scheduler.pacing import PREFILL_CHUNK_TOKENS, PREFILL_SHARE, StepPace
from machd.scheduler.waiting import QueueLimits


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """When rows may have draft tokens.

    A sequence that runs alone may. Several rows may only if the model can roll back each row by itself:
    otherwise a pass over one token of each row gives more tokens than drafts for one row.

    Attributes:
        max_draft_tokens: Draft tokens of a row in one step; 0 for never.
        is_batched: Rows that run together may have drafts.
    """

    max_draft_tokens: int = 0
    is_batched: bool = False

    def tokens_for(self, running: int) -> int:
        """Draft tokens of each row while ``running`` sequences have slots."""
        return self.max_draft_tokens if running == 1 or self.is_batched else 0

    def is_speculative(self, running: int) -> bool:
        """Return True if a step of so many sequences drafts for a sequence that runs alone."""
        return running <= 1 and self.max_draft_tokens > 0


NO_DRAFTS = DraftPolicy()


@dataclass(frozen=True, slots=True)
class AdapterPolicy:
    """Admission of rows with adapters: into shared passes, alone, or not at all.

    Attributes:
        is_batched: Rows with adapters may share a pass; otherwise each is computed alone.
        refusal: Reason to refuse every row with adapters; empty if they may run.
    """

    is_batched: bool = True
    refusal: str = ""


BATCHED_ADAPTERS = AdapterPolicy()


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The configuration of a scheduler; a running one gets another at an idle moment.

    Attributes:
        mode: Decode mode of a step without drafts.
        slot_count: Sequences that run together.
        window_s: Time that an idle scheduler waits for more requests before it starts.
        coalesce: Identical requests share a sequence.
        kv: KV budget of running sequences; None for single flight, which has no limit.
        limits: Bounds of the queue.
        pace: Prompt tokens and drafts of a step.
        drafts: When drafts are allowed.
        adapters: Whether rows may have adapters.
    """

    mode: DecodeMode
    slot_count: int
    window_s: float
    coalesce: bool
    kv: KvBudget | None
    limits: QueueLimits
    pace: StepPace
    drafts: DraftPolicy = NO_DRAFTS
    adapters: AdapterPolicy = BATCHED_ADAPTERS

    def has_room_for(self, tokens: int) -> bool:
        """Return True if a sequence of so many positions, prompt and completion together, may run at all."""
        idle = Promised(max_rows=self.slot_count)
        return self.kv is None or idle.lane_for(self.kv, tokens) is not None

    def differs_only_in_limits(self, other: SchedulerConfig) -> bool:
        """Return True if a change to ``other`` needs no idle moment."""
        is_alike = replace(self, limits=other.limits, pace=other.pace) == other
        return is_alike and self.pace.is_configured_as(other.pace)


def continuous(
    limits: QueueLimits,
    batching: Batching,
    drafts: DraftPolicy = NO_DRAFTS,
    *,
    experts_on_disk: bool = False,
) -> SchedulerConfig:
    """Return the config of continuous batching: ``max_b`` slots and a KV budget."""
    return SchedulerConfig(
        DecodeMode.BATCHED,
        slot_count=batching.max_b,
        window_s=batching.window_s,
        coalesce=batching.coalesce,
        kv=batching.kv,
        limits=limits,
        pace=_pace(
            batching.prefill_chunk_tokens,
            share=batching.prefill_share,
            experts_on_disk=experts_on_disk,
        ),
        drafts=drafts,
    )


def single_flight(
    limits: QueueLimits,
    drafts: DraftPolicy = NO_DRAFTS,
    *,
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    experts_on_disk: bool = False,
) -> SchedulerConfig:
    """Return the safe default: one slot, first come, first served, nothing shared."""
    return SchedulerConfig(
        DecodeMode.SINGLE,
        slot_count=1,
        window_s=0.0,
        coalesce=False,
        kv=None,
        limits=limits,
        pace=_pace(None, alone=prefill_chunk_tokens, experts_on_disk=experts_on_disk),
        drafts=drafts,
    )


def _pace(
    beside_decode: int | None,
    alone: int = PREFILL_CHUNK_TOKENS,
    *,
    share: float = PREFILL_SHARE,
    experts_on_disk: bool,
) -> StepPace:
    if not experts_on_disk:
        return StepPace(beside_decode=beside_decode, share=share, alone=alone)
    # A few dozen tokens already need most experts, so each chunk reads nearly all that are not in memory.
    return StepPace(beside_decode=beside_decode, share=share, alone=alone, min_alone=alone)
