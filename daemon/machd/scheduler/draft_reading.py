"""Counts of draft tokens since the start."""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.protocol.step import StepResult

LEAST_BATCHED_GAIN = 1.1
"""Tokens a second with tokens ahead over those without that justify them where other rows wait."""


@dataclass(frozen=True, slots=True)
class DraftReading:
    """Draft counts at one moment.

    Attributes:
        cycles: Verifications of a row's drafts.
        drafted_tokens: Draft tokens verified.
        accepted_tokens: Draft tokens accepted.
        drafted_by_position: Verifications of a first, second, ... draft token.
        accepted_by_position: How many of them were accepted, with all before them.
        fallbacks: Rows that went on without drafts because their proposer failed.
        batched_gain: Tokens a second of steps with drafts for several rows over those without; None
            before one.
    """

    cycles: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    fallbacks: int = 0
    batched_gain: float | None = None

    @property
    def acceptance(self) -> float | None:
        """Accepted share of draft tokens; None before the first."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


class DraftCounts:
    """Counter of the draft outcomes of steps."""

    def __init__(self) -> None:
        """Start at zero."""
        self._cycles = self._fallbacks = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def observe(self, result: StepResult) -> None:
        """Add the outcomes of a step."""
        self._fallbacks += len(result.draft_faults)
        for outcome in result.drafts:
            self._cycles += 1
            missing = outcome.drafted_tokens - len(self._drafted)
            self._drafted += [0] * missing
            self._accepted += [0] * missing
            for position in range(outcome.drafted_tokens):
                self._drafted[position] += 1
                self._accepted[position] += position < outcome.accepted_tokens

    @property
    def reading(self) -> DraftReading:
        """Counts so far."""
        return DraftReading(
            self._cycles,
            sum(self._drafted),
            sum(self._accepted),
            tuple(self._drafted),
            tuple(self._accepted),
            self._fallbacks,
        )
