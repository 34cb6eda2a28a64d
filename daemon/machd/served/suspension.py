"""A time in which a model has no engine process, because another model has its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


class Suspension:
    """A time without a process, from the order to end it to the order to start another one."""

    def __init__(self) -> None:
        """Begin to wait for the end of the process."""
        self.begun: Future[None] = Future()
        self._ended = threading.Event()
        self._timer: threading.Timer | None = None

    def kill_after(self, kill: Callable[[], None], limit_s: float) -> None:
        """Kill the process if it has not ended by itself within the limit."""
        self._timer = threading.Timer(limit_s, kill)
        self._timer.daemon = True
        self._timer.start()

    def begin(self) -> None:
        """Note that the process has ended: its memory is the system's again."""
        if self._timer is not None:
            self._timer.cancel()
        if not self.begun.done():
            self.begun.set_result(None)

    def end(self) -> None:
        """Have another process started."""
        self._ended.set()

    def wait(self) -> None:
        """Wait until another process is to be started, or none ever."""
        self._ended.wait()
