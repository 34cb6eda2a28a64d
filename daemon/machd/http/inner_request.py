"""Requests that a web socket's client makes by messages: each goes through the whole server as an HTTP request does.

So the gate, keys, limits, leases, metrics and traces hold for them, and a message means what its HTTP request means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import cast
from urllib.parse import quote

import msgspec
from litestar.types import ASGIApp, HTTPReceiveMessage, Message, Receive, Scope, Send

from machd.http.answering import note_connection

_FRAME_END = b"\n\n"


class AnsweredError(Exception):
    """An answer that is an error.

    Attributes:
        status: Of HTTP.
        body: As the dialect of the request's path writes it.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class InnerClient:
    """Makes the requests of one call or channel of a socket's client.

    Attributes:
        has_left: Whether the client does not want the answer any more.
    """

    def __init__(self, app: ASGIApp, socket_scope: Scope, authorization: str | None) -> None:
        """Ask ``app`` as the client of ``socket_scope``, with ``authorization`` as the header of that name."""
        self._app = app
        self._socket_scope = socket_scope
        self._authorization = authorization
        self._left = asyncio.Event()

    @property
    def has_left(self) -> bool:
        """Whether :meth:`leave` was called."""
        return self._left.is_set()

    def leave(self) -> None:
        """End the answers, as a client does that closes its connection."""
        self._left.set()

    async def ask(self, route: str, body: object = None) -> bytes:
        """Return the body of a whole answer.

        ``route`` is a method and a path, such as ``GET /v1/models``.

        Raises:
            AnsweredError: The answer is an error.
        """
        return (await self._answer(route, body, _skip)).whole

    async def stream(
        self, route: str, body: object, on_frame: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Pass each frame of a stream of events on, without its empty line; ends early if the client leaves.

        Raises:
            AnsweredError: The answer is an error.
        """
        await self._answer(route, body, on_frame)

    async def _answer(
        self, route: str, body: object, on_frame: Callable[[bytes], Awaitable[None]]
    ) -> _Answer:
        content = b"" if body is None else msgspec.json.encode(body)
        has_read = False

        async def receive() -> HTTPReceiveMessage:
            nonlocal has_read
            if not has_read:
                has_read = True
                return {"type": "http.request", "body": content, "more_body": False}
            await self._left.wait()
            return {"type": "http.disconnect"}

        answer = _Answer(on_frame)
        scope = self._scope(route, len(content))
        note_connection(scope, answer)
        await self._app(scope, cast(Receive, receive), cast(Send, answer.take))
        if self.has_left:
            return answer
        if answer.is_cut or answer.status >= HTTPStatus.BAD_REQUEST:
            raise AnsweredError(answer.status, answer.whole)
        return answer

    def _scope(self, route: str, body_bytes: int) -> Scope:
        method, _, path = route.partition(" ")
        outer = self._socket_scope
        headers = [(name, value) for name, value in outer["headers"] if name == b"host"]
        headers.append((b"content-length", str(body_bytes).encode()))
        if body_bytes:
            headers.append((b"content-type", b"application/json"))
        if self._authorization is not None:
            headers.append((b"authorization", self._authorization.encode()))
        scope: dict[str, object] = {
            "type": "http",
            "asgi": outer["asgi"],
            "http_version": "1.1",
            "server": outer["server"],
            "client": outer["client"],
            "scheme": "http",
            "method": method,
            "root_path": "",
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": b"",
            "headers": headers,
            "state": {},
        }
        return cast(Scope, scope)


class _Answer:
    """An answer as it comes, and the connection that it seems to go over.

    Attributes:
        whole: Its body, unless it is a stream.
        is_cut: Whether the server could not go on with it.
    """

    def __init__(self, on_frame: Callable[[bytes], Awaitable[None]]) -> None:
        self.status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
        self.whole = b""
        self.is_cut = False
        self._on_frame = on_frame
        self._is_stream = False

    async def take(self, message: Message) -> None:
        """Take a message of ASGI."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._is_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", [])
            )
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            if not self._is_stream:
                self.whole += body
                return
            # The server writes whole frames, one or several at once.
            for frame in filter(None, body.split(_FRAME_END)):
                await self._on_frame(frame)

    def check_stalled(self) -> None:
        """Do nothing: the socket looks after its client."""

    def abort(self) -> None:
        """Note that the answer is broken."""
        self.is_cut = True


async def _skip(_frame: bytes) -> None:
    """Take a frame of a stream that nothing reads."""
