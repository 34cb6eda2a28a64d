"""A daemon whose guesses are looked at: what it answers, how fast, and what it says of its guesses."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Self

from machd.bench.client import CompletionClient
from machd.bench.connection import ServerAddress
from machd.bench.speculation.counters import DraftCounters
from machd.bench.target import Dialect, Target, token_ids
from machd.bench.timing import RequestTiming
from machd.clock import Clock
from machd.errors import EngineFaultError

_LOOK_UP_S = 30.0
_SETTLED_AFTER_S = 0.05
_READINGS_AT_MOST = 20
_WARM_UP_PROMPT = "Say the days of the week."
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TimedDecode:
    """An answer, and how fast it grew once it had begun.

    Attributes:
        first_tokens: Of the answer, those that were there at its first moment: more than one if
            the first pass accepted guesses.
    """

    timing: RequestTiming
    first_tokens: int

    @property
    def decoded_tokens(self) -> int:
        """Those that came after the first moment."""
        return self.timing.completion_tokens - self.first_tokens

    @property
    def decode_s(self) -> float:
        """From the first moment to the last token."""
        return self.timing.last_token_s - self.timing.text_s[0]


@dataclass(frozen=True, slots=True)
class SpeculatingServer:
    """A daemon, with guesses or without."""

    target: Target
    clock: Clock

    @classmethod
    async def find(cls, address: ServerAddress, *, clock: Clock) -> Self:
        """Get to know a daemon; the short answers that this takes warm it.

        Messages are sent as chats, which is what they are, unless the model has no template for
        them.

        Raises:
            OSError: It cannot be reached.
            EngineFaultError: It answers, but not as a server of this API.
        """
        target = await Target.find(address, clock=clock)
        chat = cls(replace(target, dialect=Dialect(is_chat=True)), clock)
        try:
            await chat.answer(_WARM_UP_PROMPT, _WARM_UP_TOKENS)
        except EngineFaultError:
            return cls(target, clock)
        return chat

    async def decode(self, prompt: str, tokens: int) -> TimedDecode:
        """Ask for so many tokens.

        Raises:
            EngineFaultError: There was no answer, or one in a single piece.
        """
        timing = await self.answer(prompt, tokens)
        decode = TimedDecode(timing, max(1, await self._count_tokens(timing.first_text)))
        if decode.decode_s <= 0 or decode.decoded_tokens <= 0:
            raise EngineFaultError("an answer came in one piece: ask for more --speculation-tokens")
        return decode

    async def answer(self, prompt: str, tokens: int) -> RequestTiming:
        """One answer.

        Raises:
            EngineFaultError: There was none.
        """
        async with aclosing(CompletionClient(self.target, self.clock)) as client:
            return await client.complete(prompt, tokens)

    async def settled_counters(self) -> DraftCounters | None:
        """What it says of its guesses once that stays as it is; None if it says nothing."""
        counters = await self._counters()
        for _ in range(_READINGS_AT_MOST):
            before = counters
            await asyncio.sleep(_SETTLED_AFTER_S)
            counters = await self._counters()
            if counters == before:
                break
        return counters

    async def _counters(self) -> DraftCounters | None:
        async with aclosing(self.target.connection(self.clock)) as connection:
            try:
                answer = await connection.exchange("GET", "/metrics", timeout_s=_LOOK_UP_S)
            except OSError:
                return None
        return DraftCounters.read(answer.body) if answer.status == 200 else None

    async def _count_tokens(self, text: str) -> int:
        """As ``/tokenize`` counts them, which may be one off what was decoded; 0 without it."""
        async with aclosing(self.target.connection(self.clock)) as connection:
            return len(await token_ids(connection, text) or ())
