"""How often an engine process may end, and how long a new one waits."""

from __future__ import annotations

from collections import deque

from machd.clock import Clock
from machd.errors import EngineFaultError

MAX_RESTARTS = 5
"""Engine processes that may be replaced within ``_WINDOW_S``, with no whole answer between them. A request to which the
engine is not equal takes two."""

_WINDOW_S = 600.0

_ISOLATING_RESTARTS = 3
"""The same, after which sequences go on one at a time: what ends the process is none that ends it at once and alone."""

_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 30.0


class Restarts:
    """The ends of engine processes since the last whole answer."""

    def __init__(self, clock: Clock, max_restarts: int = MAX_RESTARTS) -> None:
        """Begin with none; ``max_restarts`` is 0 for a process that cannot be replaced."""
        self._clock = clock
        self._max_restarts = max_restarts
        self._ends_s: deque[float] = deque()

    @property
    def backoff_s(self) -> float:
        """How long to wait before the next process: not at all after the first end, then twice as long each time."""
        count = len(self._ends_s)
        return 0.0 if count <= 1 else min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (count - 2))

    @property
    def is_isolating(self) -> bool:
        """Whether a new process is to compute one sequence at a time."""
        return len(self._ends_s) >= _ISOLATING_RESTARTS

    def note(self) -> None:
        """Count an end.

        Raises:
            EngineFaultError: It is one too many.
        """
        now_s = self._clock.monotonic_s()
        self._ends_s.append(now_s)
        while self._ends_s[0] < now_s - _WINDOW_S:
            self._ends_s.popleft()
        if len(self._ends_s) > self._max_restarts:
            raise EngineFaultError(f"{len(self._ends_s)} engine processes in a row have ended")

    def forget(self) -> None:
        """Begin anew: a whole answer shows that the engine works."""
        self._ends_s.clear()
