"""Made-up answers with guesses and without."""

from __future__ import annotations

from collections.abc import Sequence

from machd.bench.speculation.counters import DraftCounters
from machd.bench.speculation.figures import SpeculationFigures
from machd.bench.speculation.pairs import Pair
from machd.bench.speculation.plan import SpeculationPlan
from machd.bench.speculation.server import TimedDecode
from machd.bench.speculation.workloads import PROMPTS, Copying, SpeculationPrompt
from machd.bench.timing import RequestTiming

COUNTERS = DraftCounters(60, 45, {1: 10, 2: 9, 3: 8}, {1: 9, 2: 8, 3: 6}, 10, 0)
SPEEDS = {Copying.QUOTE: 3.0, Copying.EDIT: 1.5, Copying.PROSE: 1.0}


def made_decode(gap_s: float, *, tokens: int = 65, text: str = "a text") -> TimedDecode:
    """An answer whose tokens come one by one."""
    text_s = tuple(0.5 + index * gap_s for index in range(tokens))
    return TimedDecode(RequestTiming(0.0, text_s[-1], text_s, 10, tokens, text=text), 1)


def made_pair(
    prompt: SpeculationPrompt,
    round_number: int,
    speed: float,
    *,
    gap_s: float = 0.06,
    counters: DraftCounters | None = COUNTERS,
    text: str = "a text",
) -> Pair:
    """Answers of which that with guesses is so many times as fast as the other."""
    off, on = made_decode(gap_s), made_decode(gap_s / speed, text=text)
    return Pair(prompt, round_number, off, on, counters)


def made_speculation(
    slowness: float = 1.0,
    *,
    rounds: Sequence[float] = (0.98, 1.0, 1.04),
    counters: DraftCounters | None = COUNTERS,
) -> SpeculationFigures:
    """Quotes that reach their goal, edits that miss theirs, and prose that is as it was.

    Args:
        slowness: Of both.
        rounds: By how much each is off.
        counters: Of each answer.
    """
    pairs = [
        made_pair(
            prompt, number, SPEEDS[prompt.copying] * off, gap_s=0.06 * slowness, counters=counters
        )
        for number, off in enumerate(rounds)
        for prompt in PROMPTS
    ]
    plan = SpeculationPlan(rounds=len(rounds))
    return SpeculationFigures.of(plan, pairs, active_mode="ngram", reason="it was asked for")
