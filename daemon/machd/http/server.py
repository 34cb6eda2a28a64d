"""uvicorn with a socket of ours and without its hands on the signals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from litestar.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["HttpServer", "cut_connection"]

_KEEP_ALIVE_S = 75
"""Longer than the minute that proxies commonly keep an idle connection for."""

_GRACE_S = 5
"""For responses that are still being written when everything else has ended."""

_ABORT_KEY = "machd_abort"


class _AbortableProtocol(H11Protocol):
    """Puts into each request's scope how to cut its connection.

    Closing a connection waits for a buffer that a stalled client never reads; ASGI has no word
    for cutting it.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        app = self.app

        async def with_abort(scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - uvicorn's own types
            scope.setdefault("state", {})[_ABORT_KEY] = transport.abort
            await app(scope, receive, send)

        self.app = with_abort


def cut_connection(scope: Scope) -> None:
    """Drop the request's connection with all that the client has not read."""
    abort: Callable[[], None] | None = scope["state"].get(_ABORT_KEY)
    if abort is not None:
        abort()


class HttpServer(uvicorn.Server):
    """Serves until :attr:`should_exit`; the daemon decides when that is, not a signal."""

    def __init__(self, app: ASGIApp) -> None:
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

    def cut_connections(self) -> None:
        """Drop what is still connected when the server has stopped: clients that do not read."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, _AbortableProtocol):
                connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to the daemon."""
        yield
