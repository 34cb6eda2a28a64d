"""How a scheduler works: its slots, budget, pace and limits; and the two ways that settings ask for."""

from __future__ import annotations

from dataclasses import dataclass

from machd.scheduler.admission import Batching, KvBudget
from machd.scheduler.events import DecodeMode
from machd.scheduler.pacing import PREFILL_CHUNK_TOKENS, StepPace
from machd.scheduler.waiting import QueueLimits


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """How many tokens may be guessed for each row of a step.

    A lonely request gets all that the machine has. When others come, a pass that computes all rows
    makes more tokens than guessing for one of them, so from the next step on nobody guesses, unless
    the model is known to take ragged guesses out of a batch; then the engine does as long as it
    measures that this makes more still.

    Attributes:
        max_draft_tokens: For a sequence that runs alone; 0 for never.
        is_batched: Whether rows that run together may have as many.
    """

    max_draft_tokens: int = 0
    is_batched: bool = False

    def tokens_for(self, running: int) -> int:
        """For each row, while so many sequences have slots."""
        return self.max_draft_tokens if running == 1 or self.is_batched else 0

    def is_speculative(self, running: int) -> bool:
        """Whether a step of so many sequences is one that guesses for a lonely one."""
        return running <= 1 and self.max_draft_tokens > 0


NO_DRAFTS = DraftPolicy()


@dataclass(frozen=True, slots=True)
class CoreShape:
    """The scheduler's configuration, whatever settings it came from.

    Attributes:
        window_s: How long an idle scheduler waits for company before it starts.
        coalesce: Whether identical sequences share a sequence.
        kv: What running sequences may take together; None where they run alone, without limit.
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
    pace: StepPace


def continuous(
    limits: QueueLimits, batching: Batching, drafts: DraftPolicy = NO_DRAFTS
) -> Arrangement:
    """As many slots as ``max_b``, a KV budget, and one sequence for identical sequences."""
    shape = CoreShape(
        DecodeMode.BATCHED,
        slot_count=batching.max_b,
        window_s=batching.window_s,
        coalesce=batching.coalesce,
        kv=batching.kv,
        drafts=drafts,
    )
    return Arrangement(limits, shape, StepPace(beside_decode=batching.prefill_chunk_tokens))


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
        StepPace(beside_decode=None, alone=prefill_chunk_tokens),
    )
