"""A server of the OpenAI API, and what it understands: found out by asking."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Self, TypeVar

import msgspec
from msgspec import Struct

from machd.bench.connection import Connection, Exchange, ServerAddress
from machd.bench.timing import excerpt
from machd.capabilities.document import Capabilities
from machd.clock import Clock
from machd.errors import EngineFaultError

COMPLETION_TIMEOUT_S = 3600.0
"""An end to a request that the server has forgotten; above any time limit of its own."""

_Answer = TypeVar("_Answer")

_LOOK_UP_S = 30.0
"""For questions that a healthy server answers at once."""

_UNKNOWN = frozenset({400, 404, 405, 422, 501})
"""Answers that may mean: this endpoint, or one of these fields, is not known here."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """Which endpoint and fields a server takes.

    Attributes:
        ignores_eos: Whether ``ignore_eos`` may be sent; without it answers may end early.
        counts_tokens: Whether ``stream_options`` may be sent; without it events are counted.
        extra: Fields that a person wants in every request, over those that the bench sends.
    """

    is_chat: bool = False
    ignores_eos: bool = True
    counts_tokens: bool = True
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The endpoint."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(
        self,
        model_id: str,
        prompt: str | Sequence[int],
        max_tokens: int,
        *,
        schema: Mapping[str, object] | None = None,
        cache_salt: str | None = None,
    ) -> bytes:
        """A greedy, streamed request; greedy, because the bare loop is.

        One with a schema has no ``ignore_eos``: the end of text is what ends such an answer.
        Token ids are a prompt of raw completions alone.
        """
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
        if schema is not None:
            fields["guided_json"] = schema
        elif self.ignores_eos:
            fields["ignore_eos"] = True
        if cache_salt is not None:
            fields["cache_salt"] = cache_salt
        if self.counts_tokens:
            fields["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(fields | dict(self.extra))


_DIALECTS = (
    Dialect(),
    Dialect(ignores_eos=False),
    Dialect(ignores_eos=False, counts_tokens=False),
    Dialect(is_chat=True),
    Dialect(is_chat=True, ignores_eos=False),
    Dialect(is_chat=True, ignores_eos=False, counts_tokens=False),
)
"""Best first: raw completions have no template that would change the prompt's length."""


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


class _Tokens(Struct):
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class TargetHints:
    """What a person knows about a server that it does not tell by itself.

    Attributes:
        model_id: Which of its models; its first one unless given.
        extra: Fields for every request.
    """

    api_key: str | None = None
    model_id: str | None = None
    extra: Mapping[str, object] = field(default_factory=dict)


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

    def connection(self, clock: Clock) -> Connection:
        """Prepare a connection to it; the caller closes it."""
        return Connection(self.address, api_key=self.api_key, clock=clock)

    @classmethod
    async def find(
        cls, address: ServerAddress, *, clock: Clock, hints: TargetHints | None = None
    ) -> Self:
        """Get to know a server, and warm it with a short completion.

        Raises:
            OSError: It cannot be reached.
            EngineFaultError: It answers, but not as a server of this API.
        """
        hints = hints or TargetHints()
        async with aclosing(Connection(address, api_key=hints.api_key, clock=clock)) as connection:
            model_id = hints.model_id or await _find_model(connection)
            return cls(
                address=address,
                api_key=hints.api_key,
                model_id=model_id,
                dialect=await _find_dialect(connection, model_id, hints.extra),
                capabilities=await look_up(connection, "/v1/capabilities", Capabilities),
            )


def check_answer(answer: Exchange, path: str) -> None:
    """Raise unless the server did what it was asked.

    Raises:
        EngineFaultError: It did not; the message holds the beginning of its answer.
    """
    if answer.status != 200:
        raise EngineFaultError(f"{path}: HTTP {answer.status}: {excerpt(answer.body)}")


async def look_up(
    connection: Connection, path: str, kind: type[_Answer], *, body: bytes | None = None
) -> _Answer | None:
    """Ask for something that other servers need not know.

    Args:
        connection: To the server.
        path: A path to get, or with a body to post to.
        kind: Type of the JSON answer.
        body: JSON.

    Returns:
        None where there is no such answer; some servers hang up on a path that they do not know.
    """
    method = "GET" if body is None else "POST"
    try:
        answer = await connection.exchange(method, path, body or b"", timeout_s=_LOOK_UP_S)
        return msgspec.json.decode(answer.body, type=kind) if answer.status == 200 else None
    except (OSError, msgspec.DecodeError):
        return None


async def token_ids(connection: Connection, text: str) -> list[int] | None:
    """Ask ``/tokenize`` of machd or of vLLM for a text's tokens; None where there is none."""
    body = msgspec.json.encode({"prompt": text, "add_special_tokens": False})
    found = await look_up(connection, "/tokenize", _Tokens, body=body)
    return None if found is None else found.tokens


async def _find_model(connection: Connection) -> str:
    answer = await connection.exchange("GET", "/v1/models", timeout_s=_LOOK_UP_S)
    check_answer(answer, "/v1/models")
    try:
        models = msgspec.json.decode(answer.body, type=_Models).data
    except msgspec.DecodeError as error:
        raise EngineFaultError(f"/v1/models: not what the OpenAI API answers: {error}") from None
    if not models:
        raise EngineFaultError("/v1/models: the server has no model")
    return models[0].id


async def _find_dialect(
    connection: Connection, model_id: str, extra: Mapping[str, object]
) -> Dialect:
    """The first dialect that is understood. What is asked also warms the server."""
    refusals: list[Exchange] = []
    for plain in _DIALECTS:
        dialect = dataclasses.replace(plain, extra=extra)
        body = dialect.body(model_id, "Once upon a time", 4)
        answer = await connection.exchange(
            "POST", dialect.path, body, timeout_s=COMPLETION_TIMEOUT_S
        )
        if answer.status not in _UNKNOWN:
            check_answer(answer, dialect.path)
            return dialect
        refusals.append(answer)
    check_answer(refusals[0], _DIALECTS[0].path)
    raise AssertionError("a refusal has an error's status")
