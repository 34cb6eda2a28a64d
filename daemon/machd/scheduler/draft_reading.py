"""What came of guesses since the start."""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.protocol.step import StepResult


@dataclass(frozen=True, slots=True)
class DraftReading:
    """Counts at one moment.

    Attributes:
        cycles: Verifications of a row's guesses.
        drafted_tokens: Guesses that were verified.
        accepted_tokens: Those that were right.
        drafted_by_position: How often there was a first, second, ... guess.
        accepted_by_position: How often it was right, all before it included.
        fallbacks: Rows for which guessing failed, so that they went on without.
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
        """The share of guesses that were right; None before there were any."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


class DraftCounts:
    """Counts what steps tell."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._cycles = self._fallbacks = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def observe(self, result: StepResult) -> None:
        """Take a step in."""
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
        """What there is by now."""
        return DraftReading(
            self._cycles,
            sum(self._drafted),
            sum(self._accepted),
            tuple(self._drafted),
            tuple(self._accepted),
            self._fallbacks,
        )
