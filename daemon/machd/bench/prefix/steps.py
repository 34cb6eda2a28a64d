"""The cache's answers step by step: what should be found, and what the server says was found.

The steps are those that people know from other servers (``1a`` to ``1d``), and what machd adds: the
beginning of a longer prompt, the next turn of a conversation, a namespace of its own, and all of it
after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from machd.bench.prefix.prompts import Pieces, PromptSource
from machd.bench.prefix.server import CachingServer, Question
from machd.bench.timing import RequestTiming

LIVE_STEPS = 7
"""Requests of the steps before a restart."""
RESTARTED_STEPS = 2

_NEW_TOKENS = 20
_ANSWER_TOKENS = 16
_SOON = 0.5
"""Of a first prompt's time: a prompt that was answered sooner was not computed whole."""


class Lookup(StrEnum):
    """The share of a prompt that a prefix cache had, as ``cached_tokens`` says it."""

    MISS = "MISS"
    """Nothing was found."""
    PREFIX_HIT = "PREFIX_HIT"
    """A beginning."""
    HIT = "HIT"
    """All of it but the last token, which is computed to get the first one of the answer."""
    UNKNOWN = "UNKNOWN"
    """The server does not say."""

    @classmethod
    def of(cls, timing: RequestTiming) -> Lookup:
        """What the server says of a request."""
        cached_tokens = timing.cached_tokens
        if cached_tokens is None or timing.prompt_tokens == 0:
            return cls.UNKNOWN
        if cached_tokens == 0:
            return cls.MISS
        return cls.HIT if cached_tokens >= timing.prompt_tokens - 1 else cls.PREFIX_HIT


@dataclass(frozen=True, slots=True)
class Expectation:
    """What should come out of a step.

    Attributes:
        least_cached_tokens: Of a beginning that should be found; 0 where any is enough.
        spare_share: Of a new prompt, what may be found all the same.
    """

    lookup: Lookup
    least_cached_tokens: int = 0
    spare_share: float = 0.0

    def is_met(self, timing: RequestTiming, first_ttft_s: float) -> bool:
        """Whether an answer is as expected.

        Where the server does not say what it found, only the time can tell.

        Args:
            timing: The answer.
            first_ttft_s: What the first prompt of the same length took.
        """
        actual = Lookup.of(timing)
        if actual is Lookup.UNKNOWN:
            return (timing.ttft_s < _SOON * first_ttft_s) == (self.lookup is not Lookup.MISS)
        cached_tokens = timing.cached_tokens or 0
        if self.lookup is Lookup.MISS:
            return cached_tokens <= self.spare_share * timing.prompt_tokens
        return actual is self.lookup and cached_tokens >= self.least_cached_tokens


class StepFigures(Struct, frozen=True, kw_only=True):
    """A row of the table.

    Attributes:
        step: Such as ``1a``.
        expected: ``MISS``, ``HIT`` or ``PREFIX_HIT``.
        actual: The same, or ``UNKNOWN``: the server does not say, and the time decides.
        prompt_tokens: As the server counted them.
        cached_tokens: Of these, taken from the cache as the server says; null if it does not.
        least_cached_tokens: What had to be found at the least.
        ttft_s: From the request's last byte to the first token.
        passed: Whether what should be found was found.
    """

    step: str
    description: str
    expected: Lookup
    actual: Lookup
    prompt_tokens: int
    cached_tokens: int | None
    least_cached_tokens: int
    ttft_s: float
    passed: bool


@dataclass(slots=True)
class PrefixSteps:
    """One walk through the steps; prompts and the first time are kept over a restart.

    Attributes:
        tokens: Of each prompt, and of the beginning that a longer one shares.
        figures: A row for each step that was made.
    """

    source: PromptSource
    tokens: int
    figures: list[StepFigures] = field(default_factory=list)
    _first: Pieces = field(init=False)
    _second: Pieces = field(init=False)
    _first_ttft_s: float = 0.0

    def __post_init__(self) -> None:
        """Make the two prompts."""
        self._first = self.source.text(self.tokens)
        self._second = self.source.text(self.tokens)

    async def walk(self, server: CachingServer) -> None:
        """Make the steps that need no restart.

        Raises:
            EngineFaultError: One of them was not answered.
        """
        miss = Expectation(Lookup.MISS, spare_share=server.template_share)
        hit = Expectation(Lookup.HIT)
        first = await self._step(server, "1a first request", self._first, miss)
        await self._step(server, "1b same prompt", self._first, hit)
        await self._step(server, "1c different prompt", self._second, miss)
        await self._step(server, "1d return to prompt 1", self._first, hit)
        longer = self._first + self.source.text(_NEW_TOKENS)
        await self._step(server, "2a longer prompt", longer, _beginning(first))
        answer = await server.pieces_of(first.text)
        next_turn = self._first + answer + self.source.text(_NEW_TOKENS)
        await self._step(server, "2b next turn", next_turn, _next_turn(server, first, answer))
        if server.takes_salt:
            await self._step(server, "3a another cache_salt", self._first, miss, salt="other")

    async def walk_restarted(self, server: CachingServer) -> None:
        """Make the steps of a server that was restarted.

        Raises:
            EngineFaultError: One of them was not answered.
        """
        hit = Expectation(Lookup.HIT)
        again = await self._step(server, "4a restarted, same prompt", self._first, hit)
        # Of the other prompt: the first one is in memory by now.
        longer = self._second + self.source.text(_NEW_TOKENS)
        expectation = _beginning(again)
        await self._step(server, "4b restarted, longer prompt", longer, expectation)

    async def _step(
        self,
        server: CachingServer,
        name: str,
        prompt: Pieces,
        expectation: Expectation,
        salt: str | None = None,
    ) -> RequestTiming:
        step, description = name.split(" ", 1)
        timing = await server.ask(Question(prompt, _ANSWER_TOKENS, salt))
        self._first_ttft_s = self._first_ttft_s or timing.ttft_s
        self.figures.append(
            StepFigures(
                step=step,
                description=description,
                expected=expectation.lookup,
                actual=Lookup.of(timing),
                prompt_tokens=timing.prompt_tokens,
                cached_tokens=timing.cached_tokens,
                least_cached_tokens=expectation.least_cached_tokens,
                ttft_s=timing.ttft_s,
                passed=expectation.is_met(timing, self._first_ttft_s),
            )
        )
        return timing


def _beginning(first: RequestTiming) -> Expectation:
    """What a longer prompt shares, but for a block that may have to be computed again."""
    return Expectation(Lookup.PREFIX_HIT, least_cached_tokens=round(0.9 * first.prompt_tokens))


def _next_turn(server: CachingServer, first: RequestTiming, answer: Pieces) -> Expectation:
    """The prompt and its answer, which only ids bring back as the tokens that they were.

    Half of the answer leaves room for a text whose end becomes other tokens than it was made of.
    One that becomes more or fewer, as nonsense does, may part from them at once.
    """
    if not server.knows_lengths:
        return _beginning(first)
    least_cached_tokens = first.prompt_tokens - 1
    if len(answer) == first.completion_tokens:
        least_cached_tokens = first.prompt_tokens + first.completion_tokens // 2
    return Expectation(Lookup.PREFIX_HIT, least_cached_tokens)
