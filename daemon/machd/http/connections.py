"""The connections of one listener: how many are open, and which one is closed to make room for another.

A connection is busy while a request on it is being answered, else it waits: for its first request, for
the rest of a head, or for the next request. Only waiting connections are closed to make room, the one that
has waited longest first, so idle connections and half-sent heads cannot keep new clients out. The gates
answer no more requests at once than the budget, so there is always a connection that waits.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Protocol, cast

from machd.http.file_limit import ACCEPTS_PER_TURN, SPARE_CONNECTIONS

_RETRY_S = 1.0
"""How long nothing is accepted after there was no descriptor or no room; less where one ends."""

_SEND_BUFFER_BYTES = 65_536
"""The kernel's buffer for what a client has not taken yet. Unset, Linux lets it grow to megabytes, and a
client that reads nothing looks for minutes as if it read."""

_LOOK_S = 1.0
"""How often the ages of connections are looked at, unless ``limits.client_stall_timeout_s`` is very short."""

_SHORTEST_LOOK_S = 0.02

_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Connection(Protocol):
    """A connection as the listener knows it."""

    def abort(self) -> None:
        """Close the connection now, with whatever the client has not taken."""
        ...

    def check_age(self) -> None:
        """Close the connection if the client has taken too long over something."""
        ...


class Connections:
    """The open connections of one listener, each of them busy or waiting.

    Attributes:
        now_s: Seconds that the event loop has run, in steps of a look. Ages are taken from it: time in
            which the event loop itself stood still is no client's fault.
    """

    def __init__(
        self, *, max_connections: Callable[[], int], stall_timeout_s: Callable[[], float]
    ) -> None:
        """Have none; the limits are read each time, because a reload may change them."""
        self._max_connections = max_connections
        self._stall_timeout_s = stall_timeout_s
        self._open: set[Connection] = set()
        self._aborted: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        self.now_s = 0.0
        self.on_end: Callable[[], None] = lambda: None

    @property
    def stall_timeout_s(self) -> float:
        """Seconds that a client may take for a head, or to take any of what was sent."""
        return self._stall_timeout_s()

    @property
    def is_full(self) -> bool:
        """True if nothing can be accepted until a connection has given its descriptor back."""
        return len(self._open) >= self._max_connections() + SPARE_CONNECTIONS + ACCEPTS_PER_TURN

    def add(self, connection: Connection) -> None:
        """Count a connection that was accepted."""
        self._open.add(connection)

    def discard(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._open.discard(connection)
        self._aborted.discard(connection)
        self._waiting.pop(connection, None)
        self.on_end()

    def note_waiting(self, connection: Connection) -> None:
        """Put a connection behind all that wait; closes the oldest of them if there are too many."""
        if connection not in self._open or connection in self._aborted:
            return
        self._waiting.pop(connection, None)
        self._waiting[connection] = None
        while (
            len(self._open) - len(self._aborted) > self._max_connections()
            and len(self._waiting) > SPARE_CONNECTIONS
        ):
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._aborted.add(oldest)
            oldest.abort()

    def note_busy(self, connection: Connection) -> None:
        """Keep a connection whose request is being answered."""
        self._waiting.pop(connection, None)

    async def watch(self) -> None:
        """Look at every connection's age again and again, until cancelled."""
        while True:
            interval_s = max(_SHORTEST_LOOK_S, min(_LOOK_S, self.stall_timeout_s / 4))
            await asyncio.sleep(interval_s)
            self.look(interval_s)

    def look(self, elapsed_s: float) -> None:
        """Let ``elapsed_s`` seconds pass, and look at every connection's age."""
        self.now_s += elapsed_s
        for connection in tuple(self._open):
            connection.check_age()


class Acceptor:
    """Accepts the connections of a listening socket, as many as there is room for.

    In place of asyncio's own server, which accepts without a bound, and without a descriptor left
    logs an error for each place of the backlog (2,048 lines a second).
    """

    def __init__(
        self,
        listening: socket.socket,
        make_connection: Callable[[], Connection],
        connections: Connections,
    ) -> None:
        self._socket = listening
        self._make_connection = make_connection
        self._connections = connections
        self._event_loop = asyncio.get_running_loop()
        self._arrivals: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False
        connections.on_end = self._retry_now

    def start(self) -> None:
        """Accept connections."""
        self._socket.settimeout(0)
        self._event_loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more; connections that come wait in the socket's backlog."""
        if not self._is_closed:
            self._is_closed = True
            self._pause()

    async def wait_closed(self) -> None:
        """Return at once; the connections are waited for where they are counted."""

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            if self._connections.is_full:
                self._pause_a_while()
                return
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._on_failure(error)
                return
            connection = self._make_connection()
            self._connections.add(connection)
            arrival = self._event_loop.create_task(self._connect(accepted, connection))
            self._arrivals.add(arrival)
            arrival.add_done_callback(self._arrivals.discard)

    async def _connect(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            accepted.settimeout(0)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            await self._event_loop.connect_accepted_socket(
                lambda: cast(asyncio.BaseProtocol, connection), accepted
            )
        except OSError:
            # The client is gone already.
            accepted.close()
            self._connections.discard(connection)

    def _on_failure(self, error: OSError) -> None:
        """Wait a while where something ran out; the log says what.

        Raises:
            OSError: It is anything else.
        """
        if error.errno not in _OUT_OF_RESOURCES:
            raise error
        self._event_loop.call_exception_handler(
            {"message": "accepting connections failed and is tried again", "exception": error}
        )
        self._pause_a_while()

    def _pause(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._socket.fileno() >= 0:
            self._event_loop.remove_reader(self._socket.fileno())

    def _pause_a_while(self) -> None:
        self._pause()
        self._retry = self._event_loop.call_later(_RETRY_S, self._retry_now)

    def _retry_now(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
            self._event_loop.add_reader(self._socket.fileno(), self._accept)
