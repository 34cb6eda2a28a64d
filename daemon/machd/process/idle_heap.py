"""Gives memory that a burst of requests left free in the heap back to the system.

glibc keeps what was freed, for reuse: after a burst the process holds the burst's memory for good.
A heap is trimmed only while no request is open, so that none waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from machd.heap import find_heap_trim, resident_bytes

_INTERVAL_S = 1.0
"""A daemon is idle where no request is open at two looks in a row."""

_GROWTH_BYTES = 32_000_000
"""Growth since the last trim that is worth one: trimming takes 4 to 70 ms."""


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
        """Look once a second until cancelled; return at once where nothing can be trimmed."""
        while self._trim is not None:
            await asyncio.sleep(_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Trim, in a worker thread, if the process was idle at the last look and is now."""
        was_idle, self._was_idle = self._was_idle, self._is_idle()
        if self._trim is None or not (was_idle and self._was_idle):
            return
        resident = self._read_resident_bytes()
        # What the prefix cache has dropped since counts as room for growth.
        self._trimmed_bytes = min(self._trimmed_bytes, resident)
        if resident - self._trimmed_bytes >= _GROWTH_BYTES:
            await asyncio.to_thread(self._trim)
            self._trimmed_bytes = self._read_resident_bytes()
