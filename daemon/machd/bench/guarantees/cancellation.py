"""The time until a cancelled stream has freed its slot."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from machd.bench.guarantees.daemon import Daemon
from machd.bench.guarantees.guarantee import GIVE_UP_S, Obstacle
from machd.errors import EngineFaultError

_RUNNING = re.compile(rb"^machd_requests_running (\S+)$", re.MULTILINE)
_LOOKED_AT_EVERY_S = 0.01


@dataclass(frozen=True, slots=True)
class Cancellation:
    """One stream; a try is the time from its client's end until no sequence runs."""

    name: str = "a cancelled stream frees a slot"
    goal_s: float = 1.0

    async def try_once(self, subject: Daemon) -> float | Obstacle:
        """Cut the stream off once it runs.

        Raises:
            EngineFaultError: The stream failed by itself.
        """
        async with subject.streaming(1) as (stream,):
            if not await _running_count(subject):
                return Obstacle("the stream ended before it could be cancelled")
            started_s = subject.clock.monotonic_s()
            stream.cancel()
            while await _running_count(subject):
                await asyncio.sleep(_LOOKED_AT_EVERY_S)
                if subject.clock.monotonic_s() - started_s > GIVE_UP_S:
                    break
            return subject.clock.monotonic_s() - started_s


async def _running_count(daemon: Daemon) -> int:
    """Sequences that hold a slot."""
    page = (await daemon.ask("GET", "/metrics")).body
    sample = _RUNNING.search(page)
    if sample is None:
        raise EngineFaultError("/metrics: machd_requests_running is missing")
    return int(float(sample[1]))
