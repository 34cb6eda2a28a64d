"""A client of any server of the OpenAI API: finds out what it understands, then asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec
from msgspec import Struct

from machd.api.capabilities import Capabilities
from machd.bench.connection import Connection, Exchange, ServerAddress
from machd.bench.timing import RequestTiming, excerpt
from machd.clock import Clock
from machd.errors import EngineFaultError

__all__ = ["CompletionClient", "Dialect", "Target"]

_LOOK_UP_S = 30.0
"""For questions that a healthy server answers at once."""

_COMPLETION_S = 3600.0
"""An end to a request that the server has forgotten; above any time limit of its own."""

_UNKNOWN = frozenset({400, 404, 405, 422, 501})
"""Answers that may mean: this endpoint, or one of these fields, is not known here."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which endpoint and fields a server takes.

    Attributes:
        ignores_eos: Whether ``ignore_eos`` may be sent; without it answers may end early.
        counts_tokens: Whether ``stream_options`` may be sent; without it events are counted.
    """

    is_chat: bool = False
    ignores_eos: bool = True
    counts_tokens: bool = True

    @property
    def path(self) -> str:
        """The endpoint."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, model_id: str, prompt: str, max_tokens: int) -> bytes:
        """A greedy, streamed request; greedy, because the bare loop is."""
        fields: dict[str, object] = {
            "model": model_id,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
        }
        if self.is_chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if self.ignores_eos:
            fields["ignore_eos"] = True
        if self.counts_tokens:
            fields["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(fields)


_DIALECTS = (
    Dialect(),
    Dialect(ignores_eos=False),
    Dialect(is_chat=True),
    Dialect(is_chat=True, ignores_eos=False),
    Dialect(is_chat=True, ignores_eos=False, counts_tokens=False),
)
"""Best first: raw completions have no template that would change the prompt's length."""


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answers, and how to ask it.

    Attributes:
        capabilities: What machd says of itself; None for another server.
    """

    address: ServerAddress
    api_key: str | None
    model_id: str
    dialect: Dialect
    capabilities: Capabilities | None

    @classmethod
    async def find(cls, address: ServerAddress, *, api_key: str | None, clock: Clock) -> Self:
        """Get to know a server, and warm it with a short completion.

        Raises:
            OSError: It cannot be reached.
            EngineFaultError: It answers, but not as a server of this API.
        """
        connection = Connection(address, api_key=api_key, clock=clock)
        try:
            model_id = await _find_model(connection)
            return cls(
                address=address,
                api_key=api_key,
                model_id=model_id,
                dialect=await _find_dialect(connection, model_id),
                capabilities=await _find_capabilities(connection),
            )
        finally:
            await connection.close()


class CompletionClient:
    """One client: it asks, reads to the end, and asks again on the same connection."""

    def __init__(self, target: Target, clock: Clock) -> None:
        """Prepare; nothing is connected yet."""
        self._target = target
        self._connection = Connection(target.address, api_key=target.api_key, clock=clock)

    async def complete(self, prompt: str, max_tokens: int) -> RequestTiming:
        """Stream a completion.

        Raises:
            EngineFaultError: The server did not give one.
        """
        dialect = self._target.dialect
        body = dialect.body(self._target.model_id, prompt, max_tokens)
        try:
            answer = await self._connection.exchange(
                "POST", dialect.path, body, timeout_s=_COMPLETION_S
            )
        except OSError as error:
            raise EngineFaultError(f"the server left a request unanswered: {error}") from error
        _check(answer, dialect.path)
        return RequestTiming.read(answer.sent_s, answer.ended_s, answer.pieces)

    async def close(self) -> None:
        """Let go of the connection."""
        await self._connection.close()


async def _find_model(connection: Connection) -> str:
    answer = await connection.exchange("GET", "/v1/models", timeout_s=_LOOK_UP_S)
    _check(answer, "/v1/models")
    try:
        models = msgspec.json.decode(answer.body, type=_Models).data
    except msgspec.DecodeError as error:
        raise EngineFaultError(f"/v1/models: not what the OpenAI API answers: {error}") from None
    if not models:
        raise EngineFaultError("/v1/models: the server has no model")
    return models[0].id


async def _find_capabilities(connection: Connection) -> Capabilities | None:
    answer = await connection.exchange("GET", "/v1/capabilities", timeout_s=_LOOK_UP_S)
    if answer.status != 200:
        return None
    try:
        return msgspec.json.decode(answer.body, type=Capabilities)
    except msgspec.DecodeError:
        return None


async def _find_dialect(connection: Connection, model_id: str) -> Dialect:
    """The first dialect that is understood. What is asked also warms the server."""
    refusals: list[Exchange] = []
    for dialect in _DIALECTS:
        body = dialect.body(model_id, "Once upon a time", 4)
        answer = await connection.exchange("POST", dialect.path, body, timeout_s=_COMPLETION_S)
        if answer.status not in _UNKNOWN:
            _check(answer, dialect.path)
            return dialect
        refusals.append(answer)
    _check(refusals[0], _DIALECTS[0].path)
    raise AssertionError("a refusal has an error's status")


def _check(answer: Exchange, path: str) -> None:
    """Raise unless the server did what it was asked.

    Raises:
        EngineFaultError: It did not; the message holds the beginning of its answer.
    """
    if answer.status != 200:
        raise EngineFaultError(f"{path}: HTTP {answer.status}: {excerpt(answer.body)}")
