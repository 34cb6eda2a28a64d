"""A server whose prefix cache is looked at: what it can be asked, and what it says of its cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

from msgspec import Struct

from machd.bench.client import CompletionClient
from machd.bench.connection import Connection, ServerAddress
from machd.bench.level import together
from machd.bench.prefix.prompts import WORDS, Piece, Pieces
from machd.bench.target import (
    COMPLETION_TIMEOUT_S,
    Dialect,
    Target,
    TargetHints,
    look_up,
    token_ids,
)
from machd.bench.timing import RequestTiming
from machd.clock import Clock
from machd.errors import EngineFaultError

_PROBE_TOKENS = 32
_SETTLED_AFTER_S = 0.2
_READINGS_AT_MOST = 25


class CacheReading(Struct, frozen=True):
    """The part ``prefix`` of machd's ``/v1/cache/stats``."""

    bytes: int = 0
    bytes_saved: int = 0
    shared_blocks: int = 0
    evictions: int = 0


class KvReading(Struct, frozen=True):
    """The part ``kv``."""

    budget_bytes: int = 0
    reserved_bytes: int = 0
    used_bytes: int = 0


class _CacheStats(Struct, frozen=True):
    prefix: CacheReading | None = None
    kv: KvReading | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and whose it is.

    Attributes:
        cache_salt: Keeps it apart in the cache; None for whoever asks.
    """

    prompt: Pieces
    max_tokens: int
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class CachingServer:
    """A server, and what it understands of all that is asked here.

    Attributes:
        vocabulary: What prompts are made of: ids of tokens, or words where ids are not taken.
        takes_salt: Whether requests may carry ``cache_salt``.
        on_answer: Told whenever an answer has ended.
    """

    target: Target
    clock: Clock
    vocabulary: tuple[Piece, ...]
    takes_salt: bool
    on_answer: Callable[[], None]

    @classmethod
    async def find(
        cls,
        address: ServerAddress,
        *,
        clock: Clock,
        on_answer: Callable[[], None],
        hints: TargetHints | None = None,
    ) -> Self:
        """Get to know a server; the short completions that this takes warm it.

        Raises:
            OSError: It cannot be reached.
            EngineFaultError: It answers, but not as a server of this API.
        """
        target = await Target.find(address, clock=clock, hints=hints)
        async with aclosing(target.connection(clock)) as connection:
            ids = await token_ids(connection, " ".join(("", *WORDS)))
            vocabulary: tuple[Piece, ...] = WORDS
            # The last id is kept out of all prompts, as what this request leaves begins with it.
            if ids and await _takes(connection, target, prompt=ids[-1:] * _PROBE_TOKENS):
                vocabulary = tuple(dict.fromkeys(ids[:-1]))
            takes_salt = await _takes(connection, target, cache_salt="machd-bench")
        return cls(target, clock, vocabulary, takes_salt, on_answer)

    @property
    def knows_lengths(self) -> bool:
        """Whether a prompt has exactly as many tokens as pieces."""
        return isinstance(self.vocabulary[0], int)

    @property
    def template_share(self) -> float:
        """How much of a prompt that is new may be found in the cache: a chat's template is."""
        return 0.1 if self.target.dialect.is_chat else 0.0

    async def ask(self, question: Question) -> RequestTiming:
        """Send one request and read its answer.

        Raises:
            EngineFaultError: There was none.
        """
        async with aclosing(CompletionClient(self.target, self.clock)) as client:
            timing = await client.complete(
                question.prompt.as_sent, question.max_tokens, cache_salt=question.cache_salt
            )
        self.on_answer()
        return timing

    async def ask_together(self, questions: list[Question]) -> list[RequestTiming]:
        """Send several at once.

        Raises:
            EngineFaultError: One of them was not answered.
        """
        timings: list[RequestTiming] = []

        async def ask(question: Question) -> None:
            timings.append(await self.ask(question))

        await together(ask(question) for question in questions)
        return timings

    async def pieces_of(self, text: str) -> Pieces:
        """An answer as a part of the next prompt.

        Raises:
            EngineFaultError: The server does not say what its tokens are, though it did before.
        """
        if not self.knows_lengths:
            return Pieces(tuple(text.split()))
        async with aclosing(self.target.connection(self.clock)) as connection:
            ids = await token_ids(connection, text)
        if ids is None:
            raise EngineFaultError("/tokenize: the server does not answer it any more")
        return Pieces(tuple(ids))

    async def reading(self) -> CacheReading | None:
        """What it says of its prefix cache now; None if it says nothing."""
        stats = await self._stats()
        return stats.prefix if stats else None

    async def kv_reading(self) -> KvReading | None:
        """What it says of its KV budget now; None if it says nothing."""
        stats = await self._stats()
        return stats.kv if stats else None

    async def settled_reading(self) -> CacheReading | None:
        """The same once it stays as it is: what an answer leaves is kept after its end."""
        reading = await self.reading()
        for _ in range(_READINGS_AT_MOST):
            before = reading
            await asyncio.sleep(_SETTLED_AFTER_S)
            reading = await self.reading()
            if reading == before:
                break
        return reading

    async def _stats(self) -> _CacheStats | None:
        async with aclosing(self.target.connection(self.clock)) as connection:
            return await look_up(connection, "/v1/cache/stats", _CacheStats)


async def _takes(
    connection: Connection,
    target: Target,
    *,
    prompt: str | list[int] = "Once upon a time",
    cache_salt: str | None = None,
) -> bool:
    """Whether a request like that is answered."""
    dialect: Dialect = target.dialect
    if dialect.is_chat and not isinstance(prompt, str):
        return False
    body = dialect.body(target.model_id, prompt, 2, cache_salt=cache_salt)
    try:
        answer = await connection.exchange(
            "POST", dialect.path, body, timeout_s=COMPLETION_TIMEOUT_S
        )
    except ConnectionError:
        return False
    return answer.status == 200
