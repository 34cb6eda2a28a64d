"""The same prompt answered without guesses and with them, one right after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from machd.bench.speculation.counters import DraftCounters
from machd.bench.speculation.plan import SpeculationPlan
from machd.bench.speculation.server import SpeculatingServer, TimedDecode
from machd.bench.speculation.workloads import SpeculationPrompt


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt.

    Attributes:
        round_number: From 0 on.
        off: Of the daemon that does not guess.
        on: Of the one that does.
        counters: What the one that guesses counted meanwhile; None where it does not say.
    """

    prompt: SpeculationPrompt
    round_number: int
    off: TimedDecode
    on: TimedDecode
    counters: DraftCounters | None

    @property
    def has_same_text(self) -> bool:
        """Whether guesses changed nothing."""
        return self.off.timing.text == self.on.timing.text


async def run_round(
    off: SpeculatingServer,
    on: SpeculatingServer,
    plan: SpeculationPlan,
    round_number: int,
    *,
    on_answer: Callable[[], None],
) -> list[Pair]:
    """Ask every prompt of both, in turns of who is first.

    A machine whose speed drifts slows both so, and whoever is asked second finds the machine warmer
    as often as the other.

    Args:
        off: The daemon that does not guess.
        on: The one that does.
        plan: What is asked.
        round_number: From 0 on.
        on_answer: Told whenever an answer has ended.

    Raises:
        EngineFaultError: One of them was not answered.
    """
    pairs: list[Pair] = []
    for index, prompt in enumerate(plan.prompts):
        before = await on.settled_counters()
        is_on_first = bool((index + round_number) % 2)
        answers: dict[bool, TimedDecode] = {}
        for is_on in (is_on_first, not is_on_first):
            server = on if is_on else off
            answers[is_on] = await server.decode(prompt.text, plan.tokens)
            on_answer()
        after = await on.settled_counters()
        counters = after - before if before is not None and after is not None else None
        pairs.append(Pair(prompt, round_number, answers[False], answers[True], counters))
    return pairs
