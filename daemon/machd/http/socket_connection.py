"""One client's web socket: uvicorn's protocol, and what machd's listeners ask of a connection.

A socket counts as busy while something that its client asked for is open, and else as waiting: then it may be closed to
make room for another connection. Pings tell a client that has gone from one that has nothing to say.
"""

from __future__ import annotations

from typing import Any, cast

import uvicorn
from litestar.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.protocol import State

from machd.http.answering import note_connection
from machd.http.connections import Connections

_PONG_S = 20.0
"""How often a client is pinged, and how long it may take to answer."""


class SocketConnection(WebSocketsSansIOProtocol):
    """A web socket's connection.

    Attributes:
        server_app: What answers on this listener; it is not the same after a reload.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        connections: Connections,
        max_message_bytes: int,
    ) -> None:
        """Wait for a transport; a longer message than ``max_message_bytes`` ends the connection with code 1009."""
        super().__init__(config, server_state, app_state)
        self.conn.max_message_size = max_message_bytes
        self.ping_interval = self.ping_timeout = _PONG_S
        self.server_app = cast(ASGIApp, self.app)
        self.app = self._answer
        self._listener_connections = connections
        self._is_busy = self._is_leaving = False
        self._limited_since_s = connections.now_s

    @property
    def has_asked(self) -> bool:
        """True: the head of its request has come."""
        return True

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - asyncio's, wrapped
        """Take the place of the connection that asked for a web socket."""
        super().connection_made(transport)
        self._listener_connections.add(self)
        self._listener_connections.note_waiting(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place to another connection."""
        super().connection_lost(exc)
        self._listener_connections.discard(self)

    def note_busy(self, *, is_busy: bool) -> None:
        """Note whether anything is open; a socket that is to leave does so once nothing is."""
        self._is_busy = is_busy
        if is_busy:
            self._listener_connections.note_busy(self)
        elif self._is_leaving:
            self._close()
        else:
            self._listener_connections.note_waiting(self)

    def end_after_answer(self) -> None:
        """Close with code 1012 once nothing is open."""
        self._is_leaving = True
        if not self._is_busy:
            self._close()

    def shutdown(self) -> None:
        """Close as soon as nothing is open: the server stops."""
        self.end_after_answer()

    def check_stalled(self) -> None:
        """Do nothing: a client that reads nothing answers no ping."""

    def check_age(self) -> None:
        """Close a connection whose client does not finish its handshake, or takes nothing of what ends it."""
        connections = self._listener_connections
        if self.handshake_complete and not self.transport.is_closing():
            self._limited_since_s = connections.now_s
        elif connections.now_s - self._limited_since_s > connections.stall_timeout_s:
            self.abort()

    def keepalive_timeout(self) -> None:
        """Close a connection whose client did not answer a ping: it reads nothing more."""
        self.abort()

    def abort(self) -> None:
        """Close the connection now, with whatever the client has not taken."""
        self.transport.abort()

    async def send(self, message: Any) -> None:  # noqa: ANN401 - uvicorn's own types
        """Send a message of ASGI; an answer of HTTP in place of a handshake ends it as well."""
        await super().send(message)
        is_answer = message["type"] == "websocket.http.response.body"
        if is_answer and not message.get("more_body", False):
            self.handshake_complete = True

    def _close(self) -> None:
        if not self.handshake_complete:
            self.abort()
        elif self.conn.state is State.OPEN:
            super().shutdown()
        else:
            self.transport.close()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - uvicorn's own types
        note_connection(cast(Scope, scope), self)
        await self.server_app(cast(Scope, scope), cast(Receive, receive), cast(Send, send))
