"""A started engine process and the front's end of its link."""

from __future__ import annotations

import errno
import os
import queue
import signal
import subprocess
import threading
from dataclasses import dataclass

from machd.link.frames import Part
from machd.link.messages import ToEngine, ToFront
from machd.link.wire import decode_to_front, encode
from machd.served.started_engine import StartedEngine

_LAST_LINES_S = 1.0
"""Time to read the last lines of a process that has ended."""


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended, for an operator.

    Attributes:
        status: Its signal or exit status, or why it was not started.
        last_lines: Last lines of its standard error, without its log.
    """

    status: str
    last_lines: tuple[str, ...] = ()


class EngineProcess:
    """One process; ended and waited for by its owner."""

    def __init__(self, started: StartedEngine) -> None:
        """Take over a process that has been started.

        Raises:
            OSError: The system has no room for a thread; the process is ended.
        """
        self._process, self._frames = started.process, started.frames
        self._error_output = started.error_output
        # The event loop sends, and must not wait for a process that reads nothing.
        self._outgoing: queue.SimpleQueue[list[Part] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="machd-link-out", daemon=True)
        try:
            self._writer.start()
        except RuntimeError as error:
            started.discard()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Send a message without waiting; it is lost if the process ends."""
        self._outgoing.put(encode(message))

    def receive(self) -> ToFront | None:
        """Wait for a message; None once the process has ended or closed its end of the link."""
        parts = self._frames.receive()
        return None if parts is None else decode_to_front(parts)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def wait(self, timeout_s: float) -> ProcessEnd:
        """Wait for the process's end, and close its descriptors.

        A process that has closed its end of the link and does not end is killed after ``timeout_s``.
        """
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.wait()
        self._outgoing.put(None)
        self._frames.end()
        self._writer.join()
        self._frames.close()
        return ProcessEnd(describe_status(status), self._error_output.last_lines(_LAST_LINES_S))

    def _write(self) -> None:
        while (parts := self._outgoing.get()) is not None:
            try:
                self._frames.send(parts)
            except OSError:
                return  # the thread that reads the link sees the process's end


def describe_status(status: int) -> str:
    """Describe the end of a process for an operator."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
