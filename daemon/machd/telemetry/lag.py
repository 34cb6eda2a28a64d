"""The event loop's lag, which delays every stream on it."""

from __future__ import annotations

import asyncio

from machd.clock import Clock

_INTERVAL_S = 0.5


class EventLoopLag:
    """Sleeps for a known time, again and again, and notes by how much it overslept."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.last_s = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            start_s = self._clock.monotonic_s()
            await asyncio.sleep(_INTERVAL_S)
            self.last_s = max(0.0, self._clock.monotonic_s() - start_s - _INTERVAL_S)
