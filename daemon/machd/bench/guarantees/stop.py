"""The time from SIGTERM to the end of the process: idle, with streams, and after a second signal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from machd.bench.guarantees.daemon import Daemon, Launcher
from machd.bench.guarantees.guarantee import GIVE_UP_S, Obstacle
from machd.bench.timing import RequestTiming
from machd.errors import EngineFaultError

_STREAMS = 4
_LOOKED_AT_EVERY_S = 0.01

_NO_STREAM_LEFT = "all streams ended by themselves: the model is too fast for this measurement"


@dataclass(frozen=True, slots=True)
class IdleStop:
    """SIGTERM to a daemon that does nothing."""

    name: str = "SIGTERM ends an idle daemon"
    goal_s: float = 3.0

    async def try_once(self, subject: Launcher) -> float | Obstacle:
        """Start a daemon and stop it.

        Raises:
            EngineFaultError: It failed, or did not leave with exit code 0.
        """
        async with subject.serving() as daemon:
            return await stop(daemon)


@dataclass(frozen=True, slots=True)
class DrainStop:
    """SIGTERM to a daemon with streams that run longer than this measurement.

    Attributes:
        drain_s: ``limits.drain_timeout_s``.
        is_second: Whether a try times a second SIGTERM, sent while the daemon drains.
    """

    name: str
    goal_s: float
    drain_s: float
    is_second: bool = False

    async def try_once(self, subject: Launcher) -> float | Obstacle:
        """Start a daemon, let streams run, and stop it, or stop it twice.

        Raises:
            EngineFaultError: It failed, or did not leave with exit code 0.
        """
        async with (
            subject.serving("--limits-drain-timeout-s", str(self.drain_s)) as daemon,
            daemon.streaming(_STREAMS) as streams,
        ):
            if self.is_second:
                daemon.process.terminate()
                await _wait_until_draining(daemon)
            took_s = await stop(daemon)
            return took_s if await _was_any_cut_off(streams) else Obstacle(_NO_STREAM_LEFT)


async def stop(daemon: Daemon) -> float:
    """Send SIGTERM and wait for the end of the process; seconds."""
    started_s = daemon.clock.monotonic_s()
    daemon.process.terminate()
    await daemon.process.end_within(GIVE_UP_S)
    return daemon.clock.monotonic_s() - started_s


async def _wait_until_draining(daemon: Daemon) -> None:
    """Return once the first SIGTERM was taken; also if the port has closed by then."""
    try:
        while (await daemon.ask("GET", "/health/ready")).status == 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(_LOOKED_AT_EVERY_S)
    except EngineFaultError:
        return


async def _was_any_cut_off(streams: Sequence[asyncio.Task[RequestTiming]]) -> bool:
    """Return whether the daemon ended while a stream still ran."""
    ends = await asyncio.gather(*streams, return_exceptions=True)
    return any(isinstance(one, EngineFaultError) for one in ends)
