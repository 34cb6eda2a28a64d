"""What a full cache costs a prompt that is not in it, against a server that has no cache.

Two servers run side by side, and each new prompt is asked of both, in turns of who is first. The
cache of the one is so small that every prompt drives out another. Meanwhile it is looked at from
outside: what it says that it holds, and what its process takes.

A machine that does something else besides makes single pairs differ by more than the goal, so there
are many pairs of short prompts, and what decides is the median of their ratios, with the quartiles
around it. Of 24 pairs, the ratio that half of all pairs stay below lies between the quartiles 97
times of 100: the binomial distribution says so, whatever that of the ratios is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from msgspec import Struct

from machd.bench.prefix.prompts import PromptSource
from machd.bench.prefix.server import CachingServer, Question
from machd.bench.server import ServerProcess
from machd.bench.statistics import Distribution, percentile
from machd.errors import MachdError

FULL_CACHE_GOAL = 0.03
"""The most that a full cache may add to the time to first token, over what it takes without."""

PROMPTS_IN_CACHE = 4
"""About so many fit into the small cache."""

_MAX_PROMPT_TOKENS = 250
_PAIRS = 24
_SHORT_PAIRS = 8
"""Where prompts are too short for a judgement."""
_FILLING = PROMPTS_IN_CACHE + 2
_ANSWER_TOKENS = 2
_LOOKED_AT_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class FullCacheLoad:
    """What both servers are asked.

    Attributes:
        prompt_tokens: Of each prompt.
    """

    prompt_tokens: int

    @classmethod
    def within(cls, tokens: int) -> Self:
        """Prompts of no more tokens than that."""
        return cls(min(tokens, _MAX_PROMPT_TOKENS))

    @property
    def pairs(self) -> int:
        """Prompts that count."""
        return _PAIRS if self.prompt_tokens == _MAX_PROMPT_TOKENS else _SHORT_PAIRS

    @property
    def requests(self) -> int:
        """All that is sent, to either."""
        return _FILLING + 2 + 2 * self.pairs


class FullCacheFigures(Struct, frozen=True, kw_only=True):
    """The same new prompts of both servers.

    Attributes:
        limit_bytes: What the small cache may hold.
        pairs: Prompts that were asked of both while the cache was full.
        full: Seconds to the first token of the server whose cache is full.
        without: Of the one that has none.
        cost_share: What the full cache adds, over what it takes without; the median of the pairs.
        cost_quartiles: The first and the third quartile of the same: far apart on a machine that
            does something else besides.
        evictions: Blocks that were driven out while the pairs ran.
        highest_bytes: The most that the cache said it held, at any time.
        full_rss_bytes: Most memory of the process with the cache, seen from outside.
        without_rss_bytes: Of the other one.
    """

    limit_bytes: int
    prompt_tokens: int
    pairs: int
    full: Distribution
    without: Distribution
    cost_share: float
    cost_quartiles: tuple[float, float]
    evictions: int | None
    highest_bytes: int | None
    full_rss_bytes: int
    without_rss_bytes: int

    @property
    def is_goal_reached(self) -> bool | None:
        """Whether a full cache costs no more than it may; None where the pairs do not agree."""
        first, third = self.cost_quartiles
        if first <= FULL_CACHE_GOAL < third:
            return None
        return third <= FULL_CACHE_GOAL

    @property
    def is_judged(self) -> bool:
        """Whether there is something to hold against the goal.

        Short prompts cost what a request costs beside them, and a cache that drove nothing out
        was not full.
        """
        return self.prompt_tokens >= _MAX_PROMPT_TOKENS and self.evictions != 0

    @classmethod
    def of(
        cls,
        limit_bytes: int,
        prompt_tokens: int,
        pairs: Sequence[tuple[float, float]],
        full: WatchedServer,
        without: WatchedServer,
    ) -> FullCacheFigures:
        """Sum up at least one pair of times, the full cache's first.

        Args:
            limit_bytes: What the small cache may hold.
            prompt_tokens: Of each prompt.
            pairs: Seconds to the first token.
            full: The server with the small cache.
            without: The one that has none.
        """
        costs = sorted(one / other - 1.0 for one, other in pairs)
        return cls(
            limit_bytes=limit_bytes,
            prompt_tokens=prompt_tokens,
            pairs=len(pairs),
            full=Distribution.of_some(one for one, _ in pairs),
            without=Distribution.of_some(other for _, other in pairs),
            cost_share=percentile(costs, 50),
            cost_quartiles=(percentile(costs, 25), percentile(costs, 75)),
            evictions=full.evictions,
            highest_bytes=full.highest_bytes,
            full_rss_bytes=full.highest_rss_bytes,
            without_rss_bytes=without.highest_rss_bytes,
        )


@dataclass(slots=True)
class WatchedServer:
    """A server's process, looked at while it works.

    Attributes:
        highest_bytes: The most that its cache held; None while it does not say.
        highest_rss_bytes: The most memory that its process took.
        evictions: Since ``count_evictions`` was called; None while it does not say.
    """

    process: ServerProcess
    server: CachingServer
    highest_bytes: int | None = None
    highest_rss_bytes: int = 0
    evictions: int | None = None
    _earlier_evictions: int = field(default=0)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look at it every now and then, and once more at the end."""
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait({watching})
        await self.look()

    async def look(self) -> None:
        """Note what there is now."""
        self.highest_rss_bytes = max(self.highest_rss_bytes, self.process.rss_bytes())
        if (reading := await self.server.reading()) is not None:
            self.highest_bytes = max(self.highest_bytes or 0, reading.bytes)
            self.evictions = reading.evictions - self._earlier_evictions

    async def count_evictions(self) -> None:
        """Begin to count."""
        if (reading := await self.server.reading()) is not None:
            self._earlier_evictions = reading.evictions

    async def _watch(self) -> None:
        while True:
            try:
                await self.look()
            except MachdError:
                return  # it has ended; who asks it will say so
            await asyncio.sleep(_LOOKED_AT_EVERY_S)


async def run_full_cache(
    servers: tuple[WatchedServer, WatchedServer],
    source: PromptSource,
    load: FullCacheLoad,
    limit_bytes: int,
) -> FullCacheFigures:
    """Fill the cache, then ask for new prompts.

    Args:
        servers: The one with the small cache, and the one that has none.
        source: Makes prompts.
        load: How many, and how long.
        limit_bytes: What the small cache may hold.

    Raises:
        EngineFaultError: One of them was not answered.
    """
    full, without = servers
    pairs: list[tuple[float, float]] = []

    def question() -> Question:
        return Question(source.text(load.prompt_tokens), _ANSWER_TOKENS)

    async with full.watched(), without.watched():
        for _ in range(_FILLING):
            await full.server.ask(question())
        # A pair that does not count: the other server has done nothing as long yet.
        await _ask_both((full, without), question())
        await full.count_evictions()
        for number in range(load.pairs):
            # Whoever is asked second may find the machine warmer, or busier.
            if number % 2:
                without_s, full_s = await _ask_both((without, full), question())
            else:
                full_s, without_s = await _ask_both((full, without), question())
            pairs.append((full_s, without_s))
    return FullCacheFigures.of(limit_bytes, load.prompt_tokens, pairs, full, without)


async def _ask_both(
    servers: tuple[WatchedServer, WatchedServer], question: Question
) -> tuple[float, float]:
    """The same of one and then of the other; the seconds that each took to its first token."""
    first, second = servers
    first_timing = await first.server.ask(question)
    return first_timing.ttft_s, (await second.server.ask(question)).ttft_s
