"""A clock for tests, which own time."""

from __future__ import annotations


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, start_s: float = 1000.0) -> None:
        """Start both readings at ``start_s``."""
        self._now_s = start_s

    def advance(self, seconds_s: float) -> None:
        """Move time forward."""
        assert seconds_s >= 0, "time does not go back"
        self._now_s += seconds_s

    def monotonic_s(self) -> float:
        """The time set by the test."""
        return self._now_s

    def unix_s(self) -> float:
        """The time set by the test."""
        return self._now_s
