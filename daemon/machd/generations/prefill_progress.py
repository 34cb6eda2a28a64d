"""How far the prompts of a request are computed, at what rate, and how long the rest takes.

Everything that shows progress reads it here: streams, ``/slots``, ``/admin/requests``. Counts come from an engine's
newest snapshot, which is a moment old.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from machd.clock import Clock
from machd.generations.generation import Generation
from machd.link.snapshot import LoopSnapshot
from machd.scheduler.waits import WaitReason

Phase = Literal["waiting", "prefill", "decode"]

_RATED_AFTER_S = 0.25
"""Time from which on a rate says something: the clocks of two processes and a step lie in it."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens that are computed, of how many.

    Attributes:
        prompt_tokens: All of them.
        cached_tokens: Those found in the prefix cache.
        prefilled_tokens: Those computed or found so far.
        elapsed_s: Since the slot was given.
        tokens_per_s: Tokens computed a second since then, those found not counted; None before that says something.
        left_s: Seconds until all are computed, at that rate; None without one.
    """

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    elapsed_s: float = 0.0
    tokens_per_s: float | None = None
    left_s: float | None = None

    @classmethod
    def of(
        cls,
        prompt_tokens: int,
        cached_tokens: int,
        prefilled_tokens: int,
        *,
        elapsed_s: float,
        age_s: float,
    ) -> Self:
        """Measure the rate.

        Args:
            prompt_tokens: All of the prompt.
            cached_tokens: Those found in the prefix cache.
            prefilled_tokens: Those computed or found, as counted ``age_s`` ago.
            elapsed_s: Since the slot was given.
            age_s: Age of the count.
        """
        computed_tokens, counted_s = prefilled_tokens - cached_tokens, elapsed_s - age_s
        rate, left_s = None, None
        if computed_tokens > 0 and counted_s >= _RATED_AFTER_S:
            rate = computed_tokens / counted_s
            left_s = max(0.0, (prompt_tokens - prefilled_tokens) / rate - age_s)
        return cls(prompt_tokens, cached_tokens, prefilled_tokens, elapsed_s, rate, left_s)

    @property
    def is_whole(self) -> bool:
        """True once every prompt is computed."""
        return self.prefilled_tokens >= self.prompt_tokens

    def __str__(self) -> str:
        """Tell it in a few words, as a keep-alive comment does."""
        left = "" if self.left_s is None else f", {self.left_s:.0f} s left"
        return f"prefill {self.prefilled_tokens}/{self.prompt_tokens}{left}"


def prefill_progress(
    generation: Generation, running: Mapping[str, int], snapshot: LoopSnapshot | None, clock: Clock
) -> PrefillProgress:
    """Return the progress of all prompts of a request together; each counts once.

    Args:
        generation: The request's.
        running: Prefilled tokens of running sequences, by their ids.
        snapshot: What they were read from; None if nothing is known of the engine.
        clock: Says how old that is.
    """
    usage, admission = generation.usage, generation.admission
    return PrefillProgress.of(
        usage.prompt_tokens,
        usage.cached_tokens,
        generation.prefilled_tokens(running),
        elapsed_s=0.0 if admission is None else clock.monotonic_s() - admission.at_s,
        age_s=0.0 if snapshot is None else age_s(snapshot, clock),
    )


def age_s(snapshot: LoopSnapshot, clock: Clock) -> float:
    """Return the age of an engine process's counts."""
    return max(0.0, clock.unix_s() - snapshot.taken_unix_s)


def phase_of(
    generation: Generation, running: Mapping[str, int], snapshot: LoopSnapshot | None
) -> Phase:
    """Return what a generation does: of one whose sequences have all been computed, as the last of them did."""
    left = generation.open_sequences
    if left and not any(one in running for one in left) and _waits(generation, snapshot):
        return "waiting"
    return "prefill" if generation.first_token_s is None else "decode"


def _waits(generation: Generation, snapshot: LoopSnapshot | None) -> bool:
    """Return whether a generation of which no sequence runs waits; else the events of its end are on their way."""
    if generation.admission is None or len(generation.sequence_ids) > 1:
        return True
    if snapshot is None:
        return False
    waits = snapshot.waits
    return waits.reason is WaitReason.MODEL or any(
        one in waits.others for one in generation.open_sequences
    )
