"""One client's connection: uvicorn's h11 protocol, and what it does not know.

That is: how long the client takes for a head, how much of what was sent it has not taken, whether it closed
its side only or left, how much of a refused body is read and dropped, and that the server is leaving. The
rules for half-closed and for lingering connections are in docs/decisions/http.md, 0036.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from litestar.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from machd.errors import ClientStalledError, InvalidRequestError
from machd.http.answering import note_connection
from machd.http.connections import Connections
from machd.http.envelope import Envelope
from machd.http.request_parser import MAX_HEAD_BYTES, RequestParser
from machd.http.socket_connection import SocketConnection
from machd.http.sse import COMMENT_KEEP_ALIVE
from machd.http.stamps import stamp

_WRITE_BUFFER_BYTES = 65_536
"""What asyncio may hold beside the kernel's buffer before writers have to wait."""

_PROBE_S = 0.05
"""How long an answer may take after the client closed its side before the client is probed."""

_UNPROBED_S = 1.0
"""The same for a client of HTTP/1.0, which knows no interim answers and so cannot be probed before."""

_PROBED_S = 0.15
"""How long a reset may take to come back; one that takes longer is seen at the next look."""

_MAX_DROPPED_BYTES = 67_108_864
"""What is read and dropped of one refused body, so that a client that writes everything before it reads finds
its answer: 32 times the default of ``limits.max_body_bytes``. Reading 64 MiB takes about 60 ms on loopback."""

_MAX_QUIET_S = 5.0
"""How long a client may send nothing after an answer that ends its connection, before it is closed on this
side as well: nginx's ``lingering_timeout``."""

_CLOSE_HEADER = (b"connection", b"close")
_EVENT_STREAM = (b"content-type", b"text/event-stream")


@dataclass(frozen=True, slots=True)
class WebSockets:
    """Where a listener takes web sockets.

    Attributes:
        paths: Of their requests; at any other path a client that asks for one gets an answer of HTTP.
        max_message_bytes: Returns the longest message that is read.
    """

    paths: frozenset[str] = frozenset()
    max_message_bytes: Callable[[], int] = lambda: 0


NO_WEB_SOCKETS = WebSockets()


class ServerFlags(ServerState):
    """State that all connections of a server share."""

    def __init__(self) -> None:
        super().__init__()
        self.is_leaving = False


class ClientConnection(H11Protocol):
    """A connection that ends when its client takes too long, and stays when it only closes its side."""

    server_state: ServerFlags

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerFlags,
        app_state: dict[str, Any],
        connections: Connections,
        envelope_of: Callable[[Scope], Envelope],
        sockets: WebSockets,
    ) -> None:
        """Wait for a transport.

        ``app_state`` is copied into the scope of each request. Of a request that cannot be read, the scope that
        ``envelope_of`` gets has type, path and headers.
        """
        super().__init__(config, server_state, app_state)
        self._sockets = sockets
        self.conn: RequestParser = RequestParser()
        self._envelope_of = envelope_of
        self._written: ClientTransport | None = None
        self._has_stalled = False
        self._listener_connections = connections
        self._is_half_closed = self._is_handed_over = False
        self._is_event_stream = False
        self._head_since_s: float | None = None
        self._dropped_bytes = 0
        self._heard_s = 0.0
        self._taken_bytes = 0
        self._taken_s = 0.0
        self._probe_timer: asyncio.TimerHandle | None = None

    @property
    def has_asked(self) -> bool:
        """True once the head of a request has come."""
        return self.cycle is not None

    @property
    def is_busy(self) -> bool:
        """True while a request is being answered."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.disconnected

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head."""
        transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
        self._written = ClientTransport(transport, self._is_client_sending)
        super().connection_made(cast(asyncio.Transport, self._written))
        self._app = self.app
        self.app = self._answer
        self._wait_for_head()
        self._listener_connections.note_waiting(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place to another connection."""
        super().connection_lost(exc)
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._listener_connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """Take what has come; the time for a head runs from its first byte."""
        assert self._written is not None, "data come over a connection that was made"
        if self._is_client_sending():
            self._heard_s = self._listener_connections.now_s
            self._dropped_bytes += len(data)
            if self._dropped_bytes > _MAX_DROPPED_BYTES:
                self.abort()
                return
        if self._written.is_lingering:
            return
        if not self.is_busy and self._head_since_s is None:
            self._wait_for_head()
        # h11 holds trailers against its bound only as often as it has to wait for more of them.
        for begin in range(0, len(data), MAX_HEAD_BYTES):
            super().data_received(data[begin : begin + MAX_HEAD_BYTES])
            if self._is_handed_over:
                return  # a client sends nothing more before its handshake is answered
            if self._written.is_closing():
                break
        self._note_state()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over to a web socket's."""
        self._listener_connections.discard(self)
        self._is_handed_over = True
        make_socket = partial(
            SocketConnection,
            connections=self._listener_connections,
            max_message_bytes=self._sockets.max_message_bytes(),
        )
        self.ws_protocol_class = cast(type[asyncio.Protocol], make_socket)
        super().handle_websocket_upgrade(event)
        socket_connection = self.transport.get_protocol()
        assert isinstance(socket_connection, SocketConnection), "it was made here"
        if not socket_connection.handshake_initiated:
            self.send_400_response("")  # its parser takes less than this one

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body that was not read."""
        super().on_response_complete()
        self._is_event_stream = False
        self._dropped_bytes, self._heard_s = 0, self._listener_connections.now_s
        if not self.is_busy:
            is_between_requests = (
                self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
            )
            self._head_since_s = None
            if not is_between_requests:
                self._wait_for_head()
            self._listener_connections.note_waiting(self)
        self._note_state()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be read, unless an answer has begun: then only the end is left."""
        del msg  # uvicorn's
        assert self._written is not None, "data come over a connection that was made"
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self._written.close()
            return
        self._dropped_bytes, self._heard_s = 0, self._listener_connections.now_s
        if self.is_busy:
            # Its handler waits for a body that cannot be read: to it, the client has left.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._wait_for_head()
            self._listener_connections.note_waiting(self)
        error = InvalidRequestError(self.conn.problem)
        scope = cast(Scope, {"type": "http", "path": self.conn.path, "headers": []})
        envelope = self._envelope_of(scope)
        request_id = stamp(scope, envelope, arrived_s=0.0, state={})
        body = envelope.encode(error, request_id)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *((name, request_id.encode()) for name in envelope.id_headers),
            _CLOSE_HEADER,
        ]
        status = HTTPStatus(envelope.status(error))
        start = h11.Response(status_code=status, headers=headers, reason=status.phrase)
        content = () if self.conn.is_head_request else (h11.Data(data=body),)
        for event in (start, *content, h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def shutdown(self) -> None:
        """Close now unless a request is being answered; then, after it."""
        super().shutdown()
        if not self.is_busy and self._written is not None:
            self._written.close_now()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a whole request all the same; returns whether the connection stays open."""
        if not self.is_busy or self.cycle.more_body:
            return False
        self._is_half_closed = True
        self.end_after_answer()
        can_be_probed = self.cycle.response_started or not self._is_http_1_0
        self._probe_timer = self.loop.call_later(
            _PROBE_S if can_be_probed else _UNPROBED_S, self._probe
        )
        return True

    def end_after_answer(self) -> None:
        """Take no request after the one that is being answered."""
        if self.is_busy:
            self.cycle.keep_alive = False

    def abort(self) -> None:
        """Close the connection now, with whatever the client has not taken."""
        self.transport.abort()

    def check_stalled(self) -> None:
        """Raise ClientStalledError if the connection was closed because its client read nothing."""
        if self._has_stalled:
            limit_s = self._listener_connections.stall_timeout_s
            raise ClientStalledError(
                f"the client read nothing for limits.client_stall_timeout_s ({limit_s:g} s)"
            )

    def check_age(self) -> None:
        """Close the connection if the client has taken too long over something."""
        if self._written is None:  # accepted, and not connected yet
            return
        now_s, limit_s = (
            self._listener_connections.now_s,
            self._listener_connections.stall_timeout_s,
        )
        if self._is_half_closed:
            self._check_reset()
        if self._head_since_s is not None and now_s - self._head_since_s > limit_s:
            self.transport.abort()
            return
        if self._written.is_lingering and now_s - self._heard_s > _MAX_QUIET_S:
            self.transport.abort()
            return
        if self._written.written_bytes == self._taken_bytes:
            self._taken_s = now_s
            return
        unread_bytes = self._unread_bytes()
        taken_bytes = self._written.written_bytes - unread_bytes
        if unread_bytes == 0 or taken_bytes > self._taken_bytes:
            self._taken_bytes, self._taken_s = taken_bytes, now_s
        elif now_s - self._taken_s > limit_s:
            self._has_stalled = True
            self.transport.abort()

    def _should_upgrade(self) -> bool:
        """True for a request for a web socket where one is taken."""
        return (
            self.scope["method"] == "GET"
            and self.scope["path"] in self._sockets.paths
            and self._get_upgrade() == b"websocket"
        )

    def _is_client_sending(self) -> bool:
        """Return True if the rest of a refused body is still to come, or cannot be read at all."""
        is_waiting = not self.is_busy and not self._is_handed_over
        return is_waiting and self.conn.their_state in {h11.SEND_BODY, h11.ERROR}

    def _wait_for_head(self) -> None:
        self._head_since_s = self._listener_connections.now_s

    def _note_state(self) -> None:
        if self.is_busy:
            self._head_since_s = None
            self._listener_connections.note_busy(self)

    def _unread_bytes(self) -> int:
        """Bytes that the client's system has not confirmed, where this one knows; else those not sent."""
        waiting_bytes = self.transport.get_write_buffer_size()
        if self.transport.is_closing():
            return waiting_bytes
        try:
            # SIOCOUTQ of tcp(7) and unix(7). Other systems than Linux have no such thing for sockets.
            answer = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return waiting_bytes
        return waiting_bytes + int(struct.unpack("i", answer)[0])

    @property
    def _is_http_1_0(self) -> bool:
        return self.cycle.scope["http_version"] == "1.0"

    @property
    def _socket(self) -> socket.socket:
        return cast(socket.socket, self.transport.get_extra_info("socket"))

    def _probe(self) -> None:
        """Write something harmless: the system of a client that has left answers with a reset."""
        if not self.is_busy or self.transport.is_closing():
            return
        if not self.cycle.response_started:
            if self._is_http_1_0:
                self.transport.abort()  # not to be told from a client that has left
                return
            interim = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            self.transport.write(self.conn.send(interim) or b"")
        elif self._is_event_stream:
            self.transport.write(self.conn.send(h11.Data(data=COMMENT_KEEP_ALIVE)) or b"")
        self._check_reset()
        self._probe_timer = self.loop.call_later(_PROBED_S, self._check_reset)

    def _check_reset(self) -> None:
        """End a half-closed connection that was reset: asyncio does not look at it until it writes."""
        if self.transport.is_closing():
            return
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0:
            self.transport.abort()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 - uvicorn's own types
        note_connection(scope, self)

        async def send_noted(message: Any) -> None:  # noqa: ANN401 - uvicorn's own types
            if message["type"] == "http.response.start":
                headers = message["headers"] = list(message.get("headers", []))
                self._is_event_stream = _is_event_stream(headers)
                if self.server_state.is_leaving or self._is_half_closed:
                    headers.append(_CLOSE_HEADER)
            await send(message)

        await self._app(scope, receive, send_noted)


def _is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    name, kind = _EVENT_STREAM
    return any(one.lower() == name and value.startswith(kind) for one, value in headers)


class ClientTransport:
    """A transport whose ``close`` waits for a client that is still sending.

    Attributes:
        written_bytes: What was written so far.
        is_lingering: Whether the answer has ended and what the client still sends is dropped.
    """

    def __init__(self, transport: asyncio.Transport, is_client_sending: Callable[[], bool]) -> None:
        """Wrap a transport; ``is_client_sending`` is asked once, when it is to be closed."""
        self._transport = transport
        self._is_client_sending = is_client_sending
        self.written_bytes = 0
        self.is_lingering = False

    def write(self, data: bytes) -> None:
        """Write, unless the answer has ended."""
        if self.is_lingering:
            return
        self.written_bytes += len(data)
        self._transport.write(data)

    def close(self) -> None:
        """End the answer; the connection as well, unless the client is still sending."""
        if self.is_closing():
            return
        if not self._is_client_sending():
            self._transport.close()
            return
        try:
            self._transport.write_eof()  # behind what waits to be written
        except OSError:  # the client has reset the connection
            self._transport.close()
            return
        self.is_lingering = True
        self._transport.resume_reading()

    def close_now(self) -> None:
        """End the connection once everything is written, whatever the client still sends."""
        self._transport.close()

    def is_closing(self) -> bool:
        """True if nothing more can be written."""
        return self.is_lingering or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a transport has
        return getattr(self._transport, name)
