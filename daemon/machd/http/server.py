"""uvicorn with machd's sockets and connections, and without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from typing import cast

import uvicorn
from litestar.types import ASGIApp, Scope

from machd.errors import FaultError
from machd.http.connection import NO_WEB_SOCKETS, ClientConnection, ServerFlags, WebSockets
from machd.http.connections import Acceptor, Connections
from machd.http.envelope import Envelope
from machd.http.socket_connection import SocketConnection
from machd.http.sockets import Listener

_KEEP_ALIVE_S = 75
"""Longer than the minute for which proxies commonly keep an idle connection."""

_GRACE_S = 5
"""Time for responses that are still being written when everything else has ended."""

_ARRIVAL_S = 0.25
"""Time for requests on their way over accepted connections."""

_LOOK_S = 0.02
"""Interval between two looks at the open connections while the server stops."""

_DATE_S = 1.0
"""Interval at which the Date header is renewed."""


class HttpServer(uvicorn.Server):
    """An application on a listener; serves until :meth:`stop`, whatever signals come."""

    def __init__(
        self,
        app: ASGIApp,
        listener: Listener,
        *,
        max_connections: Callable[[], int],
        stall_timeout_s: Callable[[], float],
        envelope_of: Callable[[Scope], Envelope],
        sockets: WebSockets = NO_WEB_SOCKETS,
    ) -> None:
        """Configure for long-lived streams; ``stall_timeout_s`` is for a head to come and an answer to be taken.

        ``h11`` because it bounds header size, which the faster parser does not.
        """
        config = uvicorn.Config(
            app,
            http=ClientConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        super().__init__(config)
        self.listener = listener
        self.server_state = self._state = ServerFlags()
        self._open_connections = Connections(
            max_connections=max_connections, stall_timeout_s=stall_timeout_s
        )
        self._envelope_of = envelope_of
        self._sockets = sockets
        self._acceptor: Acceptor | None = None
        self._has_started = asyncio.Event()
        self._is_to_end = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Accept connections; once is enough."""
        if self._serving is None:
            self._serving = asyncio.create_task(self.serve(sockets=[self.listener.socket]))

    async def wait_started(self) -> None:
        """Wait until requests are read; FaultError if the server has ended instead."""
        assert self._serving is not None, "started"
        started = asyncio.create_task(self._has_started.wait())
        await asyncio.wait({started, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._serving.done():
            raise FaultError("the HTTP server has stopped") from self._serving.exception()

    async def wait_ended(self) -> None:
        """Wait for the server to stop; re-raise its error."""
        assert self._serving is not None, "started"
        await asyncio.shield(self._serving)

    def leave(self) -> None:
        """Answer the requests that have come, and send clients elsewhere for the next one.

        On an inherited socket no connection is accepted any more: new clients wait for the next daemon. On a
        socket of machd's own new clients get an error with the reason.
        """
        if self._state.is_leaving:
            return
        self._state.is_leaving = True
        if self.listener.is_inherited:
            self._stop_accepting()
        for connection in self._connections:
            connection.end_after_answer()

    async def stop(self, timeout_s: float) -> None:
        """Stop, whether clients read their answers or not."""
        if self._serving is None:
            return
        self.leave()
        self._stop_accepting()
        await self._wait_for_arrivals()
        self.should_exit = True
        self._is_to_end.set()
        await asyncio.wait({self._serving}, timeout=timeout_s)
        for connection in self._connections:
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections, and log it; uvicorn would let asyncio accept them, without a limit."""
        del sockets  # the listener's
        await self.lifespan.startup()
        self._acceptor = Acceptor(
            self.listener.socket, self._make_connection, self._open_connections
        )
        # uvicorn only closes it and waits for it.
        self.servers = [cast(asyncio.Server, self._acceptor)]
        self._acceptor.start()
        self.started = True
        self._has_started.set()

    async def main_loop(self) -> None:
        """Serve until told to stop, and end connections whose clients take too long meanwhile.

        In place of uvicorn's own loop, which polls for the stop ten times a second.
        """
        watching = asyncio.create_task(self._open_connections.watch())
        try:
            while not await self.on_tick(0):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_to_end.wait(), _DATE_S)
        finally:
            watching.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close idle connections, wait for running answers up to ``_GRACE_S``, then cancel them.

        In place of uvicorn's own shutdown, which sleeps for 0.1 s even without a connection.
        """
        self._stop_accepting()
        for listening in sockets or []:
            listening.close()
        for connection in self._connections:
            connection.shutdown()
        await asyncio.sleep(0)  # lets the closed connections leave the set
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                # uvicorn keeps plain sets, whose emptying has to be polled.
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_S)
        for task in self.server_state.tasks:
            task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to the daemon."""
        yield

    def _make_connection(self) -> ClientConnection:
        return ClientConnection(
            self.config,
            self._state,
            self.lifespan.state,
            self._open_connections,
            self._envelope_of,
            self._sockets,
        )

    @property
    def _connections(self) -> list[ClientConnection | SocketConnection]:
        return [
            connection
            for connection in self.server_state.connections
            if isinstance(connection, ClientConnection | SocketConnection)
        ]

    def _stop_accepting(self) -> None:
        """Leave connections in the backlog; connections that were just accepted are still served."""
        if self._acceptor is not None:
            self._acceptor.close()

    async def _wait_for_arrivals(self) -> None:
        """Let new connections send a request, and answer that the server is shutting down."""
        for _ in range(round(_ARRIVAL_S / _LOOK_S)):
            await asyncio.sleep(_LOOK_S)
            if all(connection.has_asked for connection in self._connections):
                return


class HttpServers:
    """All servers, started and stopped together as far as their sockets allow."""

    def __init__(self, public: HttpServer, admin: HttpServer | None = None) -> None:
        self._public = public
        self._all = (public,) if admin is None else (public, admin)

    def start(self) -> None:
        """Accept connections, except on an inherited public socket.

        Its clients wait while the model loads, until :meth:`start_all`; on other sockets clients get an error
        that says that the model loads.
        """
        for server in self._all:
            if server is not self._public or not server.listener.is_inherited:
                server.start()

    async def start_all(self) -> None:
        """Accept connections on every socket until requests are read; FaultError if a server has ended instead."""
        for server in self._all:
            server.start()
            await server.wait_started()

    async def wait_ended(self) -> None:
        """Wait until a server stops; re-raise what ended it."""
        ended = [asyncio.create_task(server.wait_ended()) for server in self._all]
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                if task.done():
                    task.result()
        finally:
            for task in ended:
                task.cancel()

    def leave(self) -> None:
        """Send clients elsewhere; see :meth:`HttpServer.leave`. Operators are still answered."""
        self._public.leave()

    async def stop(self, timeout_s: float) -> None:
        """End all of them."""
        await asyncio.gather(*(server.stop(timeout_s) for server in self._all))
