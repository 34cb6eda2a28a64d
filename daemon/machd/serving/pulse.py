"""The engine thread's heartbeat: what tells a thread that works from one that hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from machd.clock import Clock

_MAX_MEASUREMENT_S = 120.0
"""What a measurement of the model may take, which bounds its own time, before it counts as hung."""


class Pulse:
    """When the thread last showed that it moves; beaten by it, read by anybody."""

    def __init__(self, clock: Clock) -> None:
        """Begin with a beat."""
        self._clock = clock
        self._allowed_s = 0.0
        self.beat()

    @property
    def age_s(self) -> float:
        """Seconds since the last beat, less those that a measurement is allowed."""
        return max(0.0, self._clock.monotonic_s() - self._last_s - self._allowed_s)

    def beat(self) -> None:
        """It moves."""
        self._last_s = self._clock.monotonic_s()

    @contextmanager
    def measurement(self) -> Iterator[None]:
        """Something that is no step and may take much longer than one."""
        self._allowed_s = _MAX_MEASUREMENT_S
        try:
            yield
        finally:
            self.beat()
            self._allowed_s = 0.0
