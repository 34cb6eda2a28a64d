"""The time from SIGTERM to the end of the process: idle, with streams, and after a second signal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from machd.bench.guarantees.daemon import Daemon, Launcher
from machd.bench.guarantees.guarantee import GIVE_UP_S, Obstacle
from machd.bench.timing import RequestTiming
from machd.errors import EngineFaultError

_DRAIN_S = 2.0
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
class DeadlineStop:
    """SIGTERM to a daemon whose streams run longer than ``limits.drain_timeout_s``, and a second."""

    name: str = f"SIGTERM ends streams, {_DRAIN_S:g} s drain"
    goal_s: float = _DRAIN_S + 1.0

    async def try_once(self, subject: Launcher) -> float | Obstacle:
        """Start a daemon, let streams run, and stop it.

        Raises:
            EngineFaultError: It failed, or did not leave with exit code 0.
        """
        async with (
            subject.serving("--limits-drain-timeout-s", str(_DRAIN_S)) as daemon,
            daemon.streaming(_STREAMS) as streams,
        ):
            took_s = await stop(daemon)
            return took_s if await _was_any_cut_off(streams) else Obstacle(_NO_STREAM_LEFT)


@dataclass(frozen=True, slots=True)
class SecondStop:
    """A second SIGTERM while a daemon drains that has an hour to do so."""

    name: str = "a second SIGTERM ends a drain"
    goal_s: float = 1.0

    async def try_once(self, subject: Launcher) -> float | Obstacle:
        """Start a daemon, let streams run, and stop it twice.

        Raises:
            EngineFaultError: It failed, or did not leave with exit code 0.
        """
        async with (
            subject.serving("--limits-drain-timeout-s", "3600") as daemon,
            daemon.streaming(_STREAMS) as streams,
        ):
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
