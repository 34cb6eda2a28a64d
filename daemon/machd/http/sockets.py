"""Listening sockets: of the daemon's own, or handed over by the service manager."""

from __future__ import annotations

import ipaddress
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from machd.errors import ListenError
from machd.http.inherited_sockets import ADMIN, PUBLIC, inherited_socket
from machd.own_files import OwnFile
from machd.unix_sockets import BACKLOG, listen_unix


class Listener:
    """A bound socket and the name of its address.

    Attributes:
        is_inherited: Whether the service manager opened it: it stays open without the daemon, and
            clients wait for the next process that accepts.
    """

    def __init__(
        self, bound: socket.socket, *, path: Path | None = None, is_inherited: bool = False
    ) -> None:
        """Own ``bound``; ``path`` is removed with it."""
        self.socket = bound
        self.is_inherited = is_inherited
        self._file = None if path is None else OwnFile(path)

    @property
    def url(self) -> str:
        """URL for clients."""
        address = self.socket.getsockname()
        if self.socket.family == socket.AF_UNIX:
            return f"unix:{address if isinstance(address, str) else '@' + address[1:].decode()}"
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"http://{host}:{address[1]}"

    @property
    def is_exposed(self) -> bool:
        """True if other machines can reach it."""
        if self.socket.family == socket.AF_UNIX:
            return False
        return not ipaddress.ip_address(self.socket.getsockname()[0]).is_loopback

    @property
    def is_open_to_all_users(self) -> bool:
        """True if it is a Unix socket that any user of this machine can connect to."""
        if self.socket.family != socket.AF_UNIX:
            return False
        address = self.socket.getsockname()
        if not isinstance(address, str) or not address:
            return True  # an abstract name has no mode
        try:
            return bool(Path(address).stat().st_mode & stat.S_IWOTH)
        except OSError:
            return True  # it cannot be known

    def open(self) -> None:
        """Let clients connect; they are answered once a server accepts them.

        From here on no other process gets the address. One with a path, or handed over, is open already.

        Raises:
            ListenError: Another process was faster.
        """
        if self.is_inherited or self._file is not None:
            return
        try:
            self.socket.listen(BACKLOG)
        except OSError as error:
            raise ListenError(
                f"cannot listen on {self.url}: {error.strerror}; another process has just begun to"
            ) from None

    def close(self) -> None:
        """Give the address back."""
        self.socket.close()
        # A successor may have put its own there since the server closed ours.
        if self._file is not None:
            self._file.remove()


def listen(host: str, port: int, *, environ: Mapping[str, str]) -> Listener:
    """Bind the public address, port 0 for any free one; a socket from the service manager wins.

    Its reach can be judged before clients can connect: see :meth:`Listener.open`. A Unix socket can be opened by the daemon's
    own user only, mode 0600; for others, let the service manager open one with another mode.

    Raises:
        ListenError: The address is taken or is not ours, or what was handed over is of no use.
    """
    inherited = inherited_socket(PUBLIC, environ)
    if inherited is not None:
        return Listener(inherited, is_inherited=True)
    return _bind(host, port, advice="choose another with --port")


def listen_admin(address: str, *, environ: Mapping[str, str]) -> Listener | None:
    """Bind the admin address; a socket handed over by the service manager wins. None for ``off``.

    Raises:
        ListenError: The address is taken or is not ours, or what was handed over is of no use.
    """
    inherited = inherited_socket(ADMIN, environ)
    if inherited is not None:
        return _checked_admin(Listener(inherited, is_inherited=True), address)
    if address == "off":
        return None
    host, port = address, 0
    if not address.startswith("unix:"):
        name, _, port_text = address.rpartition(":")
        host, port = name.strip("[]"), int(port_text)
    return _bind(host, port, advice="choose another with --admin-listen")


def _checked_admin(listener: Listener, address: str) -> Listener:
    problem = None
    if address == "off":
        problem = "and admin.listen is off; remove its .socket unit or the setting"
    elif listener.is_exposed:
        problem = "that other machines can reach; it has to be on loopback or have a path"
    elif listener.is_open_to_all_users:
        problem = "that every user can open; set SocketMode=0600 in its .socket unit"
    if problem is not None:
        listener.close()
        raise ListenError(f"the service manager hands over an admin socket {problem}")
    return listener


def _bind(host: str, port: int, *, advice: str) -> Listener:
    if host.startswith("unix:"):
        path = Path(host.removeprefix("unix:"))
        return Listener(listen_unix(path), path=path)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:
        # A name that cannot be looked up is a ValueError.
        reason = error.strerror if isinstance(error, OSError) else "no name is like that"
        raise ListenError(f"{host!r} is no address to listen on: {reason}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ListenError(f"cannot listen on {host}:{port}: {error.strerror}; {advice}") from None
    return Listener(bound)
