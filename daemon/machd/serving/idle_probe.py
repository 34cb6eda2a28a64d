"""What is measured beside the daemon, taken up at idle moments."""

from __future__ import annotations

from machd.clock import Clock
from machd.engine.protocol import Engine
from machd.serving.startup_guard import Probe, Results

__all__ = ["IdleProbe"]

_IDLE_S = 1.0
"""Nobody has asked for anything for so long: a pause between two requests is no idle moment."""


class IdleProbe:
    """Asks for news while the engine is idle, until there can be none. Lives on the engine thread."""

    def __init__(self, probe: Probe, clock: Clock) -> None:
        """Begin with everything left to do.

        Args:
            probe: Measures, and tells what is known so far.
            clock: Reads time.
        """
        self._probe = probe
        self._clock = clock
        self._idle_since_s: float | None = None
        self._is_done = False

    def news(self, engine: Engine, *, is_idle: bool) -> Results:
        """What is known now; None where it is not the moment to ask, or nothing more will be known."""
        if self._is_done or not self._is_moment(is_idle=is_idle):
            return None
        results = self._probe.measure_next(engine)
        self._is_done = results is None
        return results

    def _is_moment(self, *, is_idle: bool) -> bool:
        if not is_idle:
            self._idle_since_s = None
            return False
        now_s = self._clock.monotonic_s()
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return now_s - self._idle_since_s >= _IDLE_S
