"""Messages to the service manager by sd_notify(3); none are sent without one."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping, MutableMapping

from machd.clock import Clock

_SERVICE_VARIABLES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_PID",
)

_SEND_TIMEOUT_S = 0.2
"""Timeout of a send to a service manager whose queue is full, which it empties at once unless it hangs."""

_US_PER_S = 1_000_000


class ServiceNotifier:
    """Sends datagrams to ``$NOTIFY_SOCKET``. Never raises: a failing service manager must not stop the daemon."""

    def __init__(self, environ: Mapping[str, str], clock: Clock) -> None:
        """Find the service manager's socket in the process's variables."""
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._watchdog_interval_s = _watchdog_interval_s(environ)
        self._clock = clock
        self._socket: socket.socket | None = None

    @property
    def is_heard(self) -> bool:
        """Return whether there is a service manager."""
        return self._address is not None

    @property
    def watchdog_interval_s(self) -> float | None:
        """The service manager's watchdog interval; None without a watchdog."""
        return self._watchdog_interval_s if self.is_heard else None

    def loading(self, *, timeout_s: float) -> None:
        """Report that the model is loading, and extend the start-up timeout by ``timeout_s``."""
        self._send(f"EXTEND_TIMEOUT_USEC={_microseconds(timeout_s)}")

    def ready(self, status: str | None = None) -> None:
        """Report that requests are answered, or that a reload has ended, successful or not."""
        self._send("READY=1", *_status_lines(status))

    def reloading(self) -> None:
        """Report that settings are being reloaded; :meth:`ready` follows."""
        # With the time, so that the service manager can tell this reload's READY from an older one.
        now_us = _microseconds(self._clock.monotonic_s())
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}", *_status_lines("reading settings"))

    def stopping(self, *, timeout_s: float, status: str | None = None) -> None:
        """Report that the daemon shuts down, and needs up to ``timeout_s``."""
        extension = f"EXTEND_TIMEOUT_USEC={_microseconds(timeout_s)}"
        self._send("STOPPING=1", extension, *_status_lines(status))

    def status(self, text: str) -> None:
        """Report the state in one line of text."""
        self._send(*_status_lines(text))

    def alive(self) -> None:
        """Report a sign of life of the engine."""
        self._send("WATCHDOG=1")

    def close(self) -> None:
        """Close the socket."""
        self._address = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        with contextlib.suppress(OSError):
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.settimeout(_SEND_TIMEOUT_S)
            self._socket.sendto("\n".join(lines).encode(), self._address)


def forget_service_variables(environ: MutableMapping[str, str]) -> None:
    """Remove the service manager's variables for this process before it starts another.

    A child that inherited the variables could say READY in the daemon's name, or take its sockets.
    """
    for name in _SERVICE_VARIABLES:
        environ.pop(name, None)


def _address(variable: str) -> bytes | None:
    """Return a path, or an abstract name with its ``@``; None for any other address, such as a vsock."""
    if variable.startswith("/"):
        return os.fsencode(variable)
    if variable.startswith("@") and len(variable) > 1:
        return b"\0" + os.fsencode(variable[1:])
    return None


def _watchdog_interval_s(environ: Mapping[str, str]) -> float | None:
    """Return the watchdog interval; None without one, or if it is another process's."""
    interval, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if pid not in {"", str(os.getpid())} or not re.fullmatch("[0-9]{1,20}", interval):
        return None
    return int(interval) / _US_PER_S or None


def _microseconds(seconds_s: float) -> int:
    return round(seconds_s * _US_PER_S)


def _status_lines(text: str | None) -> tuple[str, ...]:
    """Return at most one assignment, because a line break in it would begin another."""
    return () if text is None else (f"STATUS={' '.join(text.split())}",)
