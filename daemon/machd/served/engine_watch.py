"""Detection of an engine that has ended for good, or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from machd.link.port import EnginePort

_MAX_LOOK_INTERVAL_S = 1.0


class EngineWatch:
    """Polls the heartbeat on the event loop, because a hung thread reports nothing."""

    def __init__(
        self, loop: EnginePort, stall_limit_s: Callable[[], float], on_stall: Callable[[], None]
    ) -> None:
        """Watch ``loop``; nothing runs yet. ``on_stall`` is told once a step has taken longer than the limit."""
        self._loop = loop
        self._stall_limit_s = stall_limit_s
        self._on_stall = on_stall

    async def failed(self) -> None:
        """Return once the engine can answer no request any more."""
        finished = asyncio.wrap_future(self._loop.finished)
        # Marks an error as retrieved, though it comes after this watch; the daemon reads it from the loop's own future.
        finished.add_done_callback(lambda done: done.cancelled() or done.exception())
        stalled = asyncio.create_task(self._stalled())
        try:
            await asyncio.wait({finished, stalled}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stalled.cancel()

    async def _stalled(self) -> None:
        """Kill an engine whose step exceeds the limit; return once it cannot be killed."""
        is_replaced = True
        while is_replaced:
            while (age_s := self._loop.heartbeat_age_s) <= (limit_s := self._stall_limit_s()):  # noqa: ASYNC110 - a hung thread sets no event
                await asyncio.sleep(min(_MAX_LOOK_INTERVAL_S, limit_s / 4))
            self._on_stall()
            front = self._loop.front
            model_id = None if front is None else front.model.model_id
            log = structlog.get_logger("machd.daemon", model=model_id)
            log.critical("engine.stalled", heartbeat_age_s=round(age_s, 1))
            is_replaced = self._loop.kill()
