"""A client of any server of the OpenAI API."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from machd.bench.connection import PieceListener
from machd.bench.target import COMPLETION_TIMEOUT_S, Target, check_answer
from machd.bench.timing import RequestTiming
from machd.clock import Clock
from machd.errors import EngineFaultError

_LEADER_HEADER = "x-coalesced"


class Client(Protocol):
    """Somebody who asks for one completion after the other."""

    async def complete(
        self,
        prompt: str,
        max_tokens: int,
        *,
        schema: Mapping[str, object] | None = None,
        on_piece: PieceListener | None = None,
    ) -> RequestTiming:
        """Ask, and wait for the whole answer.

        Args:
            prompt: A text to continue.
            max_tokens: How long the answer is.
            schema: A JSON schema that the answer is held to.
            on_piece: Told of every piece of the answer as it comes.

        Raises:
            EngineFaultError: There was none.
        """
        ...

    async def aclose(self) -> None:
        """Let go of what the client holds."""
        ...


ClientMaker: TypeAlias = Callable[[], Client]
"""A new client; what is measured is the same, whoever answers."""


class CompletionClient:
    """One client: it asks, reads to the end, and asks again on the same connection."""

    def __init__(self, target: Target, clock: Clock) -> None:
        """Prepare; nothing is connected yet."""
        self._target = target
        self._connection = target.connection(clock)

    async def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        schema: Mapping[str, object] | None = None,
        on_piece: PieceListener | None = None,
        cache_salt: str | None = None,
    ) -> RequestTiming:
        """Stream a completion.

        Args:
            prompt: A text, or the ids of its tokens where the server takes raw completions.
            max_tokens: How long the answer is.
            schema: A JSON schema that the answer is held to.
            on_piece: Told of every piece of the answer as it comes.
            cache_salt: Keeps the prompt apart in the server's prefix cache.

        Raises:
            EngineFaultError: The server did not give one.
        """
        dialect = self._target.dialect
        body = dialect.body(
            self._target.model_id, prompt, max_tokens, schema=schema, cache_salt=cache_salt
        )
        try:
            answer = await self._connection.exchange(
                "POST", dialect.path, body, timeout_s=COMPLETION_TIMEOUT_S, on_piece=on_piece
            )
        except OSError as error:
            raise EngineFaultError(f"the server left a request unanswered: {error}") from error
        check_answer(answer, dialect.path)
        timing = RequestTiming.read(answer.sent_s, answer.ended_s, answer.pieces)
        return dataclasses.replace(timing, leader_id=answer.headers.get(_LEADER_HEADER))

    async def aclose(self) -> None:
        """Let go of the connection."""
        await self._connection.aclose()
