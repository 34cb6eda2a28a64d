"""What ``machd bench --speculation`` is to do: chosen on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from machd.bench.speculation.workloads import PROMPTS, SpeculationPrompt

LEAST_JUDGED_ROUNDS = 3
"""Fewer show nothing, whatever came out of them."""


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """The load.

    Attributes:
        mode: Value of ``speculation.mode`` for the daemon that guesses.
        tokens: Of an answer.
        rounds: How often each prompt is asked of both daemons.
        prompts: Of all workloads.
    """

    mode: str = "auto"
    tokens: int = 64
    rounds: int = LEAST_JUDGED_ROUNDS
    prompts: tuple[SpeculationPrompt, ...] = PROMPTS

    @property
    def requests(self) -> int:
        """Answers that are timed, of both daemons."""
        return 2 * self.rounds * len(self.prompts)
