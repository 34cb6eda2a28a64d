"""Takes up the results of probes that run beside the daemon, while no request runs."""

from __future__ import annotations

from machd.clock import Clock
from machd.engine.protocol.engine import Engine
from machd.serving.startup_guard import Probe, Results

_IDLE_S = 1.0
"""No request ran for this long: a pause between two requests does not count as idle."""


class IdleProbe:
    """Polls the probe while the engine is idle, until it has finished. Lives on the engine thread."""

    def __init__(self, probe: Probe, clock: Clock) -> None:
        """Start with everything left to measure.

        Args:
            probe: Measures, and tells what is known so far.
            clock: Reads time.
        """
        self._probe = probe
        self._clock = clock
        self._idle_since_s: float | None = None
        self._is_done = False

    def news(self, engine: Engine, *, is_idle: bool) -> Results:
        """Return the results known now; None while the engine is busy or when the probe has finished."""
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
