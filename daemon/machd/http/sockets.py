"""Where the daemon listens: sockets of its own, or handed over by the service manager."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from machd.errors import ListenError

__all__ = ["Listener", "listen", "listen_admin"]

_BACKLOG = 2048

_FIRST_INHERITED_FD = 3
"""SD_LISTEN_FDS_START of sd_listen_fds(3)."""


class Listener:
    """A bound socket and how to say where it is."""

    def __init__(self, bound: socket.socket, *, path: Path | None = None) -> None:
        """Own ``bound``; ``path`` is removed with it."""
        self.socket = bound
        self._path = path

    @property
    def url(self) -> str:
        """Where clients go, as a person would type it."""
        address = self.socket.getsockname()
        if self.socket.family == socket.AF_UNIX:
            return f"unix:{address}"
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"http://{host}:{address[1]}"

    @property
    def is_exposed(self) -> bool:
        """Whether other machines can reach it."""
        if self.socket.family == socket.AF_UNIX:
            return False
        return not ipaddress.ip_address(self.socket.getsockname()[0]).is_loopback

    def open(self) -> None:
        """Let clients connect; they are answered when a server accepts them."""
        self.socket.listen(_BACKLOG)

    def close(self) -> None:
        """Give the address back."""
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def listen(host: str, port: int, *, environ: Mapping[str, str]) -> Listener:
    """Bind the public address; a socket handed over by the service manager wins.

    Nothing is accepted yet: see :meth:`Listener.open`.

    Args:
        host: An address, a name, or ``unix:PATH``.
        port: 0 for any free one.
        environ: The process's variables.

    Raises:
        ListenError: The address is taken or is not ours.
    """
    return _bind(host, port, environ)


def listen_admin(address: str) -> Listener | None:
    """Bind the admin address: a loopback address with its port, or ``unix:PATH``.

    Returns:
        None for ``off``.

    Raises:
        ListenError: The address is taken or is not ours.
    """
    if address == "off":
        return None
    if address.startswith("unix:"):
        return _bind(address, 0, {})
    host, _, port = address.rpartition(":")
    return _bind(host.strip("[]"), int(port), {})


def _bind(host: str, port: int, environ: Mapping[str, str]) -> Listener:
    if environ.get("LISTEN_PID") == str(os.getpid()) and environ.get("LISTEN_FDS", "0") != "0":
        return Listener(socket.socket(fileno=_FIRST_INHERITED_FD))
    if host.startswith("unix:"):
        return _bind_unix(Path(host.removeprefix("unix:")))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"server.host: {host!r} is no address: {error.strerror}") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ListenError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port"
        ) from None
    return Listener(bound)


def _bind_unix(path: Path) -> Listener:
    """Bind a socket that only our own user can connect to, replacing one that nobody serves."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(mask)
    except OSError as error:
        bound.close()
        raise ListenError(f"cannot listen on unix:{path}: {error.strerror}") from None
    return Listener(bound, path=path)


def _remove_stale(path: Path) -> None:
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
