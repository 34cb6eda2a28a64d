"""uvicorn with a socket of ours and without its hands on the signals."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from litestar.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from machd.errors import ListenError

__all__ = ["HttpServer", "Listener", "cut_connection", "listen"]

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
"""Longer than the minute that proxies commonly keep an idle connection for."""

_GRACE_S = 5
"""For responses that are still being written when everything else has ended."""

_ABORT_KEY = "machd_abort"

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

    def close(self) -> None:
        """Give the address back."""
        self.socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def listen(host: str, port: int, *, environ: Mapping[str, str], allow_exposed: bool) -> Listener:
    """Bind the public address; a socket handed over by the service manager wins.

    Args:
        host: An address, a name, or ``unix:PATH``.
        port: 0 for any free one.
        environ: The process's variables.
        allow_exposed: Whether other machines may be able to reach it.

    Raises:
        ListenError: The address is taken, is not ours, or is exposed and may not be.
    """
    listener = _bind(host, port, environ)
    if listener.is_exposed and not allow_exposed:
        url = listener.url
        listener.close()
        raise ListenError(
            f"{url} can be reached from other machines; set auth.api_keys_file first, or listen "
            "on 127.0.0.1"
        )
    listener.socket.listen(_BACKLOG)
    return listener


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
