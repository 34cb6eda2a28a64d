"""Many users with one system prompt, at once: what their prompts take in memory, and how long.

The same requests are sent twice. First all users are in one namespace, then each is in one of its
own (``cache_salt``), so that nobody finds what another left. What either set adds to the cache is
what the server says before and after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from machd.bench.prefix.prompts import Pieces, PromptSource
from machd.bench.prefix.server import CacheReading, CachingServer, Question
from machd.bench.statistics import Distribution
from machd.bench.timing import RequestTiming

SHARING_GOAL = 0.80
"""The least share of the cache's bytes that a shared system prompt saves."""

_QUESTION_TOKENS = (20, 30)
_ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class SharedPrompt:
    """A load.

    Attributes:
        users: How many ask at once.
        system_tokens: What all their prompts begin with.
    """

    users: int = 10
    system_tokens: int = 500

    @property
    def requests(self) -> int:
        """Of both sets."""
        return 2 * self.users


class SharingSide(Struct, frozen=True, kw_only=True):
    """One of the sets.

    Attributes:
        added_bytes: What the cache holds more than before; null where the server does not say.
        prompt_tokens: Of all users.
        cached_tokens: Of these, taken from the cache; null where the server does not say.
        ttft: From sending a request to its first token.
    """

    added_bytes: int | None
    prompt_tokens: int
    cached_tokens: int | None
    ttft: Distribution

    @classmethod
    def of(
        cls,
        timings: Sequence[RequestTiming],
        before: CacheReading | None,
        after: CacheReading | None,
    ) -> SharingSide:
        """Sum up at least one answer and what the server said around it."""
        cached = [timing.cached_tokens for timing in timings if timing.cached_tokens is not None]
        return cls(
            added_bytes=after.bytes - before.bytes if before and after else None,
            prompt_tokens=sum(timing.prompt_tokens for timing in timings),
            cached_tokens=sum(cached) if cached else None,
            ttft=Distribution.of_some(timing.ttft_s for timing in timings),
        )


class SharingFigures(Struct, frozen=True, kw_only=True):
    """Both sets.

    Attributes:
        shared: In one namespace.
        separate: Each user in one of its own.
        saved_share: What sharing takes less of the bytes that the other set adds.
        bytes_saved: What the server itself says that sharing saves, for the first set.
        shared_blocks: Blocks that the first set's users share, as the server says.
        evictions: Blocks that either set drove out: with any, the bytes say less.
    """

    users: int
    system_tokens: int
    shared: SharingSide
    separate: SharingSide
    saved_share: float | None
    bytes_saved: int | None
    shared_blocks: int | None
    evictions: int | None

    @property
    def most_saved_share(self) -> float:
        """What a cache could save at best: all but one copy of the system prompt."""
        own_tokens = self.users * (_QUESTION_TOKENS[0] + _ANSWER_TOKENS - 1)
        all_tokens = self.users * self.system_tokens + own_tokens
        return (self.users - 1) * self.system_tokens / all_tokens

    @property
    def is_judged(self) -> bool:
        """Whether so many users with such a prompt could reach the goal."""
        return self.most_saved_share >= SHARING_GOAL

    @classmethod
    def of(
        cls,
        load: SharedPrompt,
        answers: tuple[Sequence[RequestTiming], Sequence[RequestTiming]],
        readings: tuple[CacheReading | None, CacheReading | None, CacheReading | None],
    ) -> SharingFigures:
        """Sum up.

        Args:
            load: What was sent.
            answers: Of the set in one namespace, and of the other.
            readings: Before the first set, between the two, and after the second.
        """
        start, middle, end = readings
        shared = SharingSide.of(answers[0], start, middle)
        separate = SharingSide.of(answers[1], middle, end)
        saved_share: float | None = None
        if shared.added_bytes is not None and separate.added_bytes:
            saved_share = 1.0 - shared.added_bytes / separate.added_bytes
        return cls(
            users=load.users,
            system_tokens=load.system_tokens,
            shared=shared,
            separate=separate,
            saved_share=saved_share,
            bytes_saved=middle.bytes_saved - start.bytes_saved if start and middle else None,
            shared_blocks=middle.shared_blocks - start.shared_blocks if start and middle else None,
            evictions=end.evictions - start.evictions if start and end else None,
        )


async def run_sharing(
    server: CachingServer, source: PromptSource, load: SharedPrompt
) -> SharingFigures:
    """Send both sets.

    Raises:
        EngineFaultError: One of the requests was not answered.
    """
    system = source.text(load.system_tokens)
    shortest, longest = _QUESTION_TOKENS
    prompts: list[Pieces] = [
        system + source.text(shortest + user % (longest - shortest + 1))
        for user in range(load.users)
    ]
    start = await server.settled_reading()
    shared = await server.ask_together([Question(one, _ANSWER_TOKENS) for one in prompts])
    middle = await server.settled_reading()
    separate = await server.ask_together(
        [Question(one, _ANSWER_TOKENS, f"user-{user}") for user, one in enumerate(prompts)]
    )
    end = await server.settled_reading()
    return SharingFigures.of(load, (shared, separate), (start, middle, end))
