"""The ear of a service manager: everything that sd_notify(3) says to it, and when."""

from __future__ import annotations

import socket
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from machd.clock import SystemClock
from support.clocks.polling import CEILING_S, wait_until


@dataclass(frozen=True, slots=True)
class Notification:
    """One datagram: its assignments, and when it came on the monotonic clock."""

    at_s: float
    fields: dict[str, str]


class NotifySocket:
    """A context manager with a socket at :attr:`path` that hears until its end."""

    def __init__(self, *, abstract: bool = False) -> None:
        """Bind it in the file system, or as an abstract name."""
        self._clock = SystemClock()
        self._directory = tempfile.TemporaryDirectory(prefix="machd-")
        self.path = ("@" if abstract else "") + str(Path(self._directory.name, "notify"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.path[1:] if abstract else self.path)
        self.heard: list[Notification] = []
        self._thread = threading.Thread(target=self._hear, daemon=True)

    def __enter__(self) -> Self:
        """Hear from now on."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Hear no more."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            bell.sendto(b"", self._socket.getsockname())
        self._thread.join(CEILING_S)
        self._socket.close()
        self._directory.cleanup()

    def all_of(self, name: str) -> list[Notification]:
        """Return what was heard with an assignment to ``name``, oldest first."""
        return [one for one in list(self.heard) if name in one.fields]

    def values(self, name: str) -> list[str]:
        """Return what was assigned to ``name``, oldest first."""
        return [one.fields[name] for one in self.all_of(name)]

    def wait_for(self, name: str, value: str) -> Notification:
        """The first notification in which ``name`` has a value that begins so."""

        def found() -> list[Notification]:
            return [one for one in self.all_of(name) if one.fields[name].startswith(value)]

        wait_until(lambda: bool(found()), f"{name}={value} is heard")
        return found()[0]

    def _hear(self) -> None:
        while data := self._socket.recv(65_536):
            pairs = (line.partition("=") for line in data.decode().split("\n"))
            fields = {name: value for name, _, value in pairs}
            self.heard.append(Notification(self._clock.monotonic_s(), fields))
