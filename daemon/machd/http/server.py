"""uvicorn with a socket of ours and without its hands on the signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from litestar.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from machd.errors import FaultError
from machd.http.sockets import Listener

__all__ = ["HttpServer", "cut_connection"]

_KEEP_ALIVE_S = 75
"""Longer than the minute that proxies commonly keep an idle connection for."""

_GRACE_S = 5
"""For responses that are still being written when everything else has ended."""

_ARRIVAL_S = 0.25
"""For requests that are on their way over connections that were accepted already."""

_ARRIVAL_LOOK_S = 0.02

_ABORT_KEY = "machd_abort"
_CLOSE_HEADER = (b"connection", b"close")


class _State(ServerState):
    """What all connections of a server know."""

    def __init__(self) -> None:
        super().__init__()
        self.is_leaving = False


class _AbortableProtocol(H11Protocol):
    """Puts into each request's scope how to cut its connection, and ends connections on the way out.

    Closing a connection waits for a buffer that a stalled client never reads; ASGI has no word
    for cutting it.
    """

    server_state: _State

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        app = self.app

        async def with_abort(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - uvicorn's own types
            scope.setdefault("state", {})[_ABORT_KEY] = transport.abort

            async def send_ending(message: Any) -> None:  # noqa: ANN401 - uvicorn's own types
                if self.server_state.is_leaving and message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", []), _CLOSE_HEADER]
                await send(message)

            await app(scope, receive, send_ending)

        self.app = with_abort

    @property
    def has_asked(self) -> bool:
        """Whether the head of a request has come."""
        return self.cycle is not None

    def end_after_answer(self) -> None:
        """Take no request after the one that is being answered."""
        if self.has_asked and not self.cycle.response_complete:
            self.cycle.keep_alive = False


def cut_connection(scope: Scope) -> None:
    """Drop the request's connection with all that the client has not read."""
    abort: Callable[[], None] | None = scope["state"].get(_ABORT_KEY)
    if abort is not None:
        abort()


class HttpServer(uvicorn.Server):
    """An application on a listener; serves until :meth:`stop`, whatever signals come."""

    def __init__(self, app: ASGIApp, listener: Listener) -> None:
        """Configure for long-lived streams.

        ``h11`` because it bounds header size, which the faster parser does not.
        """
        config = uvicorn.Config(
            app,
            http=_AbortableProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(config)
        self.listener = listener
        self.server_state = self._state = _State()
        self._has_started = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Accept connections; once is enough."""
        if self._serving is None:
            self._serving = asyncio.create_task(self.serve(sockets=[self.listener.socket]))

    async def wait_started(self) -> None:
        """Until requests are read.

        Raises:
            FaultError: It has ended instead.
        """
        assert self._serving is not None, "started"
        started = asyncio.create_task(self._has_started.wait())
        await asyncio.wait({started, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._serving.done():
            raise FaultError("the HTTP server has stopped") from self._serving.exception()

    async def wait_ended(self) -> None:
        """Until it serves no longer; raises what ended it."""
        assert self._serving is not None, "started"
        await asyncio.shield(self._serving)

    def leave(self) -> None:
        """Answer what has come, and let clients go elsewhere for the next request.

        On an inherited socket nothing more is accepted: who connects waits for the successor. On
        one of our own there is none, so whoever comes is told why it is not served.
        """
        if self._state.is_leaving:
            return
        self._state.is_leaving = True
        if self.listener.is_inherited:
            self._stop_accepting()
        for connection in self._connections:
            connection.end_after_answer()

    async def stop(self, timeout_s: float) -> None:
        """End, whether clients read their answers or not."""
        if self._serving is None:
            return
        self.leave()
        self._stop_accepting()
        await self._wait_for_arrivals()
        self.should_exit = True
        await asyncio.wait({self._serving}, timeout=timeout_s)
        for connection in self._connections:
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and say so."""
        await super().startup(sockets)
        self._has_started.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to the daemon."""
        yield

    @property
    def _connections(self) -> list[_AbortableProtocol]:
        return [
            connection
            for connection in self.server_state.connections
            if isinstance(connection, _AbortableProtocol)
        ]

    def _stop_accepting(self) -> None:
        """Leave connections in the backlog; those accepted in this very moment are still served.

        asyncio's own close() drops the latter without a word, so it comes later.
        """
        if self.started and self.listener.socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.listener.socket.fileno())

    async def _wait_for_arrivals(self) -> None:
        """Let who has just connected ask, and be told that the server leaves."""
        for _ in range(round(_ARRIVAL_S / _ARRIVAL_LOOK_S)):
            await asyncio.sleep(_ARRIVAL_LOOK_S)
            if all(connection.has_asked for connection in self._connections):
                return
