"""One ZMQ endpoint: a listening socket, and the few connections that it serves at a time."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import structlog

from machd.clock import Clock, Throttle
from machd.errors import ListenError
from machd.kv_events.zmtp import PeerError, ZmtpConnection
from machd.own_files import OwnFile
from machd.unix_sockets import listen_unix

MAX_CONNECTIONS = 32
"""Of one endpoint; a router has one."""

MAX_OPEN_FILES = MAX_CONNECTIONS + 2
"""Of one endpoint: its own socket, and a connection that is about to be refused."""

_ACCEPT_PAUSE_S = 0.005
"""Between two connections, so that a flood of them takes little of the processor; the others wait in the backlog."""

_RETRY_S = 1.0
"""How long nothing is accepted after there was no descriptor for a connection."""

_KEEP_ALIVE_S = 60
"""Silence after which the system finds out whether a peer's machine is still there."""


class ZmtpListener:
    """Accepts connections, and hands each that has shaken hands to a coroutine.

    Attributes:
        endpoint: Where peers connect; a port that was left to the system is filled in.
    """

    def __init__(
        self,
        endpoint: str,
        clock: Clock,
        *,
        setting: str,
        socket_type: bytes,
        peer_types: Collection[bytes],
        talk: Callable[[ZmtpConnection], Awaitable[None]],
    ) -> None:
        """Listen on ``tcp://ADDRESS:PORT`` or ``ipc://PATH``; nothing is accepted yet.

        Args:
            endpoint: The address.
            clock: Reads the time between two lines of the log.
            setting: Key of the endpoint's setting.
            socket_type: ZMQ's name of this end's type.
            peer_types: Those of the types that may connect.
            talk: Serves one connection, until the peer leaves.

        Raises:
            ListenError: It cannot; the message begins with the setting's key.
        """
        self._file: OwnFile | None = None
        try:
            if endpoint.startswith("ipc://"):
                path = Path(endpoint.removeprefix("ipc://"))
                self._socket = listen_unix(path)
                self._file = OwnFile(path)
                self.endpoint = endpoint
            else:
                self._socket = _listen_tcp(endpoint)
                self.endpoint = _tcp_endpoint(self._socket)
        except ListenError as error:
            raise ListenError(f"{setting}: {error}") from None
        self._socket.setblocking(False)  # noqa: FBT003 - the standard library's
        self._report = Throttle(clock)
        self._log = structlog.get_logger("machd.kv_events")
        self._hosts: dict[asyncio.Task[None], str] = {}
        """Of each connection, the machine at its other end."""
        self._socket_type = socket_type
        self._peer_types = peer_types
        self._talk = talk
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept connections, on the running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._listen()

    async def stop(self, *, within_s: float) -> None:
        """Accept no more, let connections end by themselves for so many seconds, then end them."""
        if self._pause is not None:
            self._pause.cancel()
        self._event_loop.remove_reader(self._socket)
        self.close()
        if self._hosts:
            await asyncio.wait(tuple(self._hosts), timeout=within_s)
        for task in tuple(self._hosts):
            task.cancel()
        await asyncio.gather(*self._hosts, return_exceptions=True)

    def close(self) -> None:
        """Give the address back."""
        self._socket.close()
        if self._file is not None:
            self._file.remove()

    def _listen(self) -> None:
        self._event_loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Accept one connection, then none for a moment."""
        pause_s = _ACCEPT_PAUSE_S
        try:
            connection, address = self._socket.accept()
        except OSError as error:  # the client has gone, or there is no descriptor
            pause_s = _ACCEPT_PAUSE_S if isinstance(error, ConnectionError) else _RETRY_S
        else:
            self._admit(connection, str(address[0]) if isinstance(address, tuple) else "")
        self._event_loop.remove_reader(self._socket)
        self._pause = self._event_loop.call_later(pause_s, self._listen)

    def _admit(self, connection: socket.socket, host: str) -> None:
        if not self._makes_room(host):
            connection.close()
            return
        connection.setblocking(False)  # noqa: FBT003 - the standard library's
        _keep_alive(connection)
        task = self._event_loop.create_task(self._converse(connection))
        self._hosts[task] = host
        task.add_done_callback(lambda done: self._hosts.pop(done, None))
        task.add_done_callback(lambda _: connection.close())  # be it cancelled before it began

    async def _converse(self, connection: socket.socket) -> None:
        peer = ZmtpConnection(connection)
        try:
            await peer.shake_hands(self._socket_type, self._peer_types)
            await self._talk(peer)
        except* (PeerError, OSError):  # TimeoutError among them
            pass

    def _makes_room(self, host: str) -> bool:
        """Return True if a connection from ``host`` may stay.

        Where all places are taken, the machine with the most connections loses its newest to one with fewer, so
        that none keeps the others out.
        """
        if len(self._hosts) < MAX_CONNECTIONS:
            return True
        if self._report.is_due():
            self._log.warning(
                "kv_events.connection_refused", endpoint=self.endpoint, connections=MAX_CONNECTIONS
            )
        counts = Counter(self._hosts.values())
        crowd, count = counts.most_common(1)[0]
        if counts[host] + 1 >= count:
            return False
        newest = next(task for task in reversed(self._hosts) if self._hosts[task] == crowd)
        newest.cancel()
        del self._hosts[newest]
        return True


def _listen_tcp(endpoint: str) -> socket.socket:
    """Listen on ``tcp://ADDRESS:PORT``; ``*`` is every IPv4 address, ``[::]`` every address.

    Raises:
        ListenError: The address is taken, or is none of this machine.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = "0.0.0.0" if host == "*" else host.strip("[]")  # noqa: S104 - what the setting asks for
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        is_ipv6 = family == socket.AF_INET6
        return socket.create_server(
            address[:2],
            family=family,
            dualstack_ipv6=is_ipv6 and socket.has_dualstack_ipv6(),
            backlog=MAX_CONNECTIONS,
        )
    except (OSError, ValueError) as error:
        # A name that cannot be looked up is a ValueError.
        reason = error.strerror if isinstance(error, OSError) else "no name is like that"
        raise ListenError(f"cannot listen on {endpoint}: {reason}") from None


def _tcp_endpoint(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Without the option, as on macOS under this name, the system's own time holds.
    if connection.family != socket.AF_UNIX and hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_S)
