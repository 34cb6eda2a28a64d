"""The standard error of an engine process: copied to the front's, with the last lines kept.

The process's log has a descriptor of its own. Here come messages of libraries, the C++ runtime and Python, such as a traceback
before a crash.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from typing import IO

MAX_LINES = 200
"""Number of lines that are kept: enough for a crash's tracebacks of all threads."""

MAX_BYTES = 16 << 10
"""Bytes of lines that are kept."""

_MAX_LINE_BYTES = 4096
"""Longest line; a longer one counts as several. Writes up to this size are atomic on a pipe."""


class ErrorOutput:
    """A thread that copies the pipe until its other end is closed everywhere."""

    def __init__(self, pipe: IO[bytes], target: int) -> None:
        """Begin to copy a process's pipe to the descriptor ``target``; both are closed at its end.

        Raises:
            RuntimeError: The system has no room for a thread.
        """
        self._pipe, self._target = pipe, target
        self._lock = threading.Lock()
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        # daemon=True: a process that the engine process has left behind may keep the pipe open.
        self._thread = threading.Thread(target=self._copy, name="machd-stderr", daemon=True)
        self._thread.start()

    def last_lines(self, timeout_s: float) -> tuple[str, ...]:
        """Wait up to ``timeout_s`` until all is copied, and return the last lines without empty ones."""
        self._thread.join(timeout_s)
        with self._lock:
            return tuple(one.decode("utf-8", "replace").rstrip() for one in self._kept)

    def _copy(self) -> None:
        with self._pipe:
            while line := self._pipe.readline(_MAX_LINE_BYTES):
                self._keep(line)
                _write(self._target, line)
        os.close(self._target)

    def _keep(self, line: bytes) -> None:
        if not line.strip():
            return
        with self._lock:
            self._kept.append(line)
            self._kept_bytes += len(line)
            while len(self._kept) > MAX_LINES or self._kept_bytes > MAX_BYTES:
                self._kept_bytes -= len(self._kept.popleft())


def _write(target: int, line: bytes) -> None:
    """Write a line past Python's buffer, whose lock no thread may hold when the interpreter ends."""
    rest = memoryview(line)
    while rest:
        try:
            rest = rest[os.write(target, rest) :]
        except OSError:
            return  # nothing reads it; the process must not wait for that


def own_error_output() -> int:
    """Return a new descriptor of this process's standard error, or of the null device if it has none.

    Raises:
        OSError: There are too many descriptors.
    """
    stream = sys.__stderr__
    return os.open(os.devnull, os.O_WRONLY) if stream is None else os.dup(stream.fileno())
