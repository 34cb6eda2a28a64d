"""Return of free heap memory to the system after a burst of requests.

glibc keeps freed memory for reuse: after a burst the process holds the burst's memory for good. The heap is
trimmed only while no request is open, so that none waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from machd.heap import find_heap_trim, resident_bytes

_INTERVAL_S = 1.0
"""Interval of checks; a daemon is idle if no request is open at two consecutive checks."""

_GROWTH_BYTES = 32_000_000
"""Least growth since the last trim for another one: trimming takes 4 to 70 ms."""


class IdleHeap:
    """Trims the heap of an idle process that has grown since it was last trimmed."""

    def __init__(
        self,
        is_idle: Callable[[], bool],
        *,
        trim: Callable[[], None] | None = None,
        read_resident_bytes: Callable[[], int] = resident_bytes,
    ) -> None:
        """Prepare to watch; nothing has been trimmed yet. ``is_idle`` tells whether no request is open."""
        self._is_idle = is_idle
        self._trim = trim or find_heap_trim()
        self._read_resident_bytes = read_resident_bytes
        self._was_idle = False
        self._trimmed_bytes = 0

    async def watch(self) -> None:
        """Check once a second until cancelled; return at once if the heap cannot be trimmed."""
        while self._trim is not None:
            await asyncio.sleep(_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Trim the heap on a worker thread if the process was idle at the last check and is now."""
        was_idle, self._was_idle = self._was_idle, self._is_idle()
        if self._trim is None or not (was_idle and self._was_idle):
            return
        resident = self._read_resident_bytes()
        # Memory that the prefix cache has freed since counts as room for growth.
        self._trimmed_bytes = min(self._trimmed_bytes, resident)
        if resident - self._trimmed_bytes >= _GROWTH_BYTES:
            await asyncio.to_thread(self._trim)
            self._trimmed_bytes = self._read_resident_bytes()
