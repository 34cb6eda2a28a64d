"""Limits of restarts of the engine process, and the delay before each."""

from __future__ import annotations

from collections import deque

from machd.clock import Clock
from machd.errors import EngineFaultError

MAX_RESTARTS = 5
"""Most restarts within ``_WINDOW_S`` without a whole answer between them. A request that crashes the engine takes
two."""

_WINDOW_S = 600.0

_ISOLATING_RESTARTS = 3
"""Restarts after which sequences run one at a time: no single sequence could be blamed for the crashes."""

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
        """Delay before the next process: 0 after the first end, then doubled each time."""
        count = len(self._ends_s)
        return 0.0 if count <= 1 else min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** (count - 2))

    @property
    def is_isolating(self) -> bool:
        """Whether a new process is to compute one sequence at a time."""
        return len(self._ends_s) >= _ISOLATING_RESTARTS

    def note(self) -> None:
        """Count the end of a process.

        Raises:
            EngineFaultError: The limit of restarts is reached.
        """
        now_s = self._clock.monotonic_s()
        self._ends_s.append(now_s)
        while self._ends_s[0] < now_s - _WINDOW_S:
            self._ends_s.popleft()
        if len(self._ends_s) > self._max_restarts:
            raise EngineFaultError(f"{len(self._ends_s)} engine processes in a row have ended")

    def forget(self) -> None:
        """Reset the counts: a whole answer shows that the engine works."""
        self._ends_s.clear()
