"""Time to first token: of prompts that are new, known, known in their beginning, and on disk.

Every round has a prompt of its own, so that its first request finds nothing. After a restart each
of these prompts is asked for once more; what a server's very first requests cost besides is paid
by short ones before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from machd.bench.prefix.prompts import Pieces, PromptSource
from machd.bench.prefix.server import CachingServer, Question
from machd.bench.statistics import Distribution
from machd.bench.timing import RequestTiming

WARM_GOAL = 0.10
"""The most that a known prompt may take, over a new one."""
RESTARTED_GOAL = 0.25
"""The most that it may take after a restart."""

LEAST_JUDGED_TOKENS = 500
"""Below, a request costs so much beside its prompt that shares of a prompt's time say little."""

_NEW_TOKENS = 20
_ANSWER_TOKENS = 2


class PrefixLatencyFigures(Struct, frozen=True, kw_only=True):
    """Seconds to the first token, and medians over the median of new prompts.

    Attributes:
        rounds: Prompts.
        prompt_tokens: Of each, as the server counted them.
        new_tokens: Behind a beginning of so many.
        cold: Of a new prompt.
        warm: Of the same one again.
        prefix: Of the same one with new tokens at its end.
        restarted: Of the first one, first asked for after a restart; null where there was none.
    """

    rounds: int
    prompt_tokens: int
    new_tokens: int
    cold: Distribution
    warm: Distribution
    prefix: Distribution
    restarted: Distribution | None
    warm_ratio: float
    prefix_ratio: float
    restarted_ratio: float | None

    @property
    def is_judged(self) -> bool:
        """Whether prompts are long enough for the goals; so are those that nobody has counted."""
        return not 0 < self.prompt_tokens < LEAST_JUDGED_TOKENS


@dataclass(slots=True)
class PrefixLatency:
    """The rounds; their prompts are kept over a restart."""

    source: PromptSource
    tokens: int
    _prompts: list[Pieces] = field(default_factory=list)
    _known: int = 0
    _cold: list[RequestTiming] = field(default_factory=list)
    _warm: list[RequestTiming] = field(default_factory=list)
    _prefix: list[RequestTiming] = field(default_factory=list)
    _restarted: list[RequestTiming] = field(default_factory=list)

    async def measure(self, server: CachingServer, rounds: int) -> None:
        """Ask for new prompts, each three times.

        Raises:
            EngineFaultError: One of them was not answered.
        """
        for _ in range(rounds):
            prompt = self.source.text(self.tokens)
            longer = prompt + self.source.text(_NEW_TOKENS)
            self._prompts.append(prompt)
            self._cold.append(await server.ask(Question(prompt, _ANSWER_TOKENS)))
            self._warm.append(await server.ask(Question(prompt, _ANSWER_TOKENS)))
            self._prefix.append(await server.ask(Question(longer, _ANSWER_TOKENS)))

    async def measure_restarted(self, server: CachingServer, count: int) -> None:
        """Ask for so many of the prompts again, none of them twice.

        Raises:
            EngineFaultError: One of them was not answered.
        """
        for prompt in self._prompts[self._known : self._known + count]:
            self._restarted.append(await server.ask(Question(prompt, _ANSWER_TOKENS)))
        self._known += count

    def figures(self) -> PrefixLatencyFigures:
        """Sum up; at least one round."""
        cold, warm, prefix = (
            Distribution.of_some(timing.ttft_s for timing in one)
            for one in (self._cold, self._warm, self._prefix)
        )
        restarted = Distribution.of(timing.ttft_s for timing in self._restarted)
        return PrefixLatencyFigures(
            rounds=len(self._cold),
            prompt_tokens=self._cold[0].prompt_tokens,
            new_tokens=_NEW_TOKENS,
            cold=cold,
            warm=warm,
            prefix=prefix,
            restarted=restarted,
            warm_ratio=warm.p50_s / cold.p50_s,
            prefix_ratio=prefix.p50_s / cold.p50_s,
            restarted_ratio=restarted.p50_s / cold.p50_s if restarted else None,
        )
