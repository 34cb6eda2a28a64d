"""The only reader of time.

Everything else is handed a :class:`Clock`, so that tests own time and no layer that should be
pure can look at the wall.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: one that only grows, one that a person understands."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        return time.monotonic()  # noqa: TID251 - this is the one place

    def unix_s(self) -> float:
        """Seconds since 1970-01-01 UTC."""
        return time.time()  # noqa: TID251 - this is the one place


class Throttle:
    """A limit of one log line in an interval; the first line is due at once."""

    def __init__(self, clock: Clock, interval_s: float = 60.0) -> None:
        """Begin with a line that is due."""
        self._clock = clock
        self._interval_s = interval_s
        self._due_s: float | None = None

    def is_due(self) -> bool:
        """Find out whether a line may be logged now; if it may, the next interval begins."""
        now_s = self._clock.monotonic_s()
        if self._due_s is not None and now_s < self._due_s:
            return False
        self._due_s = now_s + self._interval_s
        return True


def thread_cpu_s() -> float:
    """CPU seconds of the calling thread."""
    return time.thread_time()
