"""A server of the OpenAI API, and what it understands: found out by asking."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

import msgspec
from msgspec import Struct

from machd.capabilities.verdict import Support
from machd.clock import Clock
from machd.errors import EngineFaultError
from machd.served.capabilities import Capabilities
from machd_bench.answer import Answer, excerpt
from machd_bench.connection import Address, Exchange, PieceListener
from machd_bench.prompts import WORDS, Prompt
from machd_bench.serve_process import ServeProcess

_COMPLETION_TIMEOUT_S = 3600.0
"""An end to a request that the server has forgotten; above any time limit of its own."""
LOOK_UP_TIMEOUT_S = 60.0
"""For questions that a healthy server answers at once."""
_MEASURING_POLL_S = 1.0
_UNKNOWN = frozenset({400, 404, 405, 422, 501})
"""Answers that may mean: this endpoint, or one of these fields, is not known here."""

_Found = TypeVar("_Found")


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


class _Tokens(Struct):
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Endpoint and fields that a server takes.

    Attributes:
        ignores_eos: Whether ``ignore_eos`` may be sent; without it answers may end early.
        counts_tokens: Whether ``stream_options`` may be sent; without it events are counted.
        extra: Fields for every request, over those that the bench sends.
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
        self, model_id: str, prompt: str | Prompt, max_tokens: int, fields: Mapping[str, object]
    ) -> bytes:
        """A greedy, streamed request; greedy, because the bare loop is.

        One with a schema has no ``ignore_eos``: the end of text is what ends such an answer.
        """
        content: object = prompt
        if not isinstance(prompt, str):
            is_words = isinstance(prompt[0], str)
            content = " ".join(map(str, prompt)) if is_words else list(prompt)
        messages = [{"role": "user", "content": content}]
        body = {"model": model_id, "max_tokens": max_tokens, "temperature": 0.0, "stream": True}
        body |= {"messages": messages} if self.is_chat else {"prompt": content}
        if self.ignores_eos and "response_format" not in fields:
            body["ignore_eos"] = True
        if self.counts_tokens:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode({**body, **fields, **self.extra})


_DIALECTS = tuple(
    Dialect(is_chat, ignores_eos, counts_tokens)
    for is_chat in (False, True)
    for ignores_eos, counts_tokens in ((True, True), (False, True), (False, False))
)
"""Best first: raw completions have no template that would change the prompt's length."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers, and how to ask it.

    Attributes:
        capabilities: What machd says of itself; None for another server.
        process: Of a server that the bench started.
    """

    address: Address
    clock: Clock
    model_id: str
    dialect: Dialect
    capabilities: Capabilities | None
    process: ServeProcess | None = None

    @classmethod
    async def find(
        cls,
        address: Address,
        clock: Clock,
        *,
        model_id: str | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> Self:
        """Get to know a server, and warm it with a short completion.

        It is asked for its first model unless ``model_id`` is given.

        Raises:
            OSError: It cannot be reached.
            EngineFaultError: It answers, but not as a server of this API.
        """
        unknown = cls(address, clock, model_id or "", Dialect(extra=extra or {}), None)
        if not model_id:
            exchange = await unknown.exchange("/v1/models")
            models = _decoded(_checked(exchange, "/v1/models"), _Models)
            if models is None or not models.data:
                raise EngineFaultError(f"/v1/models names no model: {excerpt(exchange.body)}")
            unknown = dataclasses.replace(unknown, model_id=models.data[0].id)
        refusals: list[Exchange] = []
        for plain in _DIALECTS:
            dialect = dataclasses.replace(plain, extra=extra or {})
            body = dialect.body(unknown.model_id, "Once upon a time", 4, {})
            timeout_s = _COMPLETION_TIMEOUT_S  # the first one may have to compile kernels
            exchange = await unknown.exchange(dialect.path, body, timeout_s=timeout_s)
            if exchange.status not in _UNKNOWN:
                _checked(exchange, dialect.path)
                capabilities = await unknown.look_up("/v1/capabilities", Capabilities)
                return dataclasses.replace(unknown, dialect=dialect, capabilities=capabilities)
            refusals.append(exchange)
        _checked(refusals[0], _DIALECTS[0].path)
        raise AssertionError("a refusal has an error's status")

    async def when_measured(self, max_s: float) -> Self:
        """Wait for machd's verdict on batching, which a first start may still measure while it serves.

        On a GPU that takes a minute, of which mlx compiles kernels for most.

        Args:
            max_s: Time after which the verdict is taken as it is.
        """
        end_s = self.clock.monotonic_s() + max_s
        server = self
        while server._is_measuring and self.clock.monotonic_s() < end_s:
            await asyncio.sleep(_MEASURING_POLL_S)
            capabilities = await self.look_up("/v1/capabilities", Capabilities)
            server = dataclasses.replace(self, capabilities=capabilities)
        return server

    @property
    def _is_measuring(self) -> bool:
        facts = self.capabilities
        verdict = None if facts is None else facts.continuous_batching
        return verdict is not None and verdict.support is Support.UNKNOWN

    async def ask(
        self,
        prompt: str | Prompt,
        max_tokens: int,
        *,
        fields: Mapping[str, object] | None = None,
        on_piece: PieceListener | None = None,
    ) -> Answer:
        """Stream a completion.

        Args:
            prompt: A text, words, or token ids where the server takes raw completions.
            max_tokens: How long the answer is.
            fields: More of the request, such as ``response_format`` or ``cache_salt``.
            on_piece: Told of every piece of the answer as it comes.

        Raises:
            EngineFaultError: The server did not give one.
        """
        path = self.dialect.path
        body = self.dialect.body(self.model_id, prompt, max_tokens, fields or {})
        try:
            exchange = await self.address.exchange(
                self.clock, path, body, timeout_s=_COMPLETION_TIMEOUT_S, on_piece=on_piece
            )
        except OSError as error:
            raise EngineFaultError(f"the server left a request unanswered: {error}") from error
        return Answer.read(_checked(exchange, path))

    async def exchange(
        self, path: str, body: bytes | None = None, *, timeout_s: float = LOOK_UP_TIMEOUT_S
    ) -> Exchange:
        """Post a body, or get a path, and read the answer, whatever its status.

        Raises:
            OSError: The connection broke, or no answer came in time.
        """
        return await self.address.exchange(self.clock, path, body, timeout_s=timeout_s)

    async def look_up(
        self, path: str, kind: type[_Found], body: bytes | None = None
    ) -> _Found | None:
        """Ask for something that other servers need not know, and may hang up on; None then."""
        try:
            exchange = await self.exchange(path, body)
        except OSError:
            return None
        return _decoded(exchange, kind) if exchange.status == 200 else None

    async def takes(self, prompt: str | Prompt = "Once upon a time", **fields: object) -> bool:
        """Tell whether a request with such fields is answered; token ids are no chat's prompt."""
        if self.dialect.is_chat and not isinstance(prompt, str):
            return False
        try:
            await self.ask(prompt, 2, fields=fields)
        except EngineFaultError:
            return False
        return True

    async def token_ids(self, text: str) -> Sequence[int]:
        """A text's tokens, as ``/tokenize`` of machd and of vLLM says them; empty without it."""
        body = msgspec.json.encode({"prompt": text, "add_special_tokens": False})
        found = await self.look_up("/tokenize", _Tokens, body)
        return found.tokens if found else ()

    async def vocabulary(self) -> Prompt:
        """The material of prompts: token ids where they are known and taken, else words."""
        ids = await self.token_ids(" ".join(("", *WORDS)))
        # The last id is kept out of all prompts, as what this request leaves begins with it.
        if ids and await self.takes([ids[-1]] * 32):
            return tuple(dict.fromkeys(ids[:-1]))
        return WORDS


def _checked(exchange: Exchange, path: str) -> Exchange:
    if exchange.status != 200:
        raise EngineFaultError(f"{path}: HTTP {exchange.status}: {excerpt(exchange.body)}")
    return exchange


def _decoded(exchange: Exchange, kind: type[_Found]) -> _Found | None:
    try:
        return msgspec.json.decode(exchange.body, type=kind)
    except msgspec.DecodeError:
        return None
