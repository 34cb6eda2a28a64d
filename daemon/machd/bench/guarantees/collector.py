"""What a trace collector that never answers costs: requests, and the stop."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from machd.bench.guarantees.daemon import Daemon, Launcher
from machd.bench.guarantees.guarantee import GIVE_UP_S, Obstacle
from machd.bench.guarantees.stop import stop
from machd.installed import installed_version

__all__ = ["CollectorDelay", "CollectorStop"]

_DISTRIBUTION = "opentelemetry-exporter-otlp-proto-http"
_ANSWERS = 5
_ANSWER_TOKENS = 2

_NOT_INSTALLED = Obstacle("machd[otel] is not installed")
_NOTHING_SENT = Obstacle(f"the daemon sent no span within {GIVE_UP_S:g} s")


@dataclass(frozen=True, slots=True)
class CollectorDelay:
    """Answers while spans are sent to a collector that hangs; a try is what the slowest is late.

    It is late by what it takes over the median answer of a daemon that sends no spans.
    """

    name: str = "delay by a hung trace collector"
    goal_s: float = 1.0

    async def try_once(self, subject: Launcher) -> float | Obstacle:
        """Ask both daemons, one after the other.

        Raises:
            EngineFaultError: A request was not answered.
        """
        if installed_version(_DISTRIBUTION) is None:
            return _NOT_INSTALLED
        async with subject.serving() as daemon:
            usual_s = statistics.median(await _answers_s(daemon))
        async with _hung_collector() as collector, subject.serving(*collector.args) as daemon:
            if not await collector.has_spans():
                return _NOTHING_SENT
            return max(0.0, max(await _answers_s(daemon)) - usual_s)


@dataclass(frozen=True, slots=True)
class CollectorStop:
    """SIGTERM while spans are sent to a collector that hangs: 2 s more than without."""

    name: str = "SIGTERM, hung trace collector"
    goal_s: float = 5.0

    async def try_once(self, subject: Launcher) -> float | Obstacle:
        """Start a daemon, wait for its first spans, and stop it.

        Raises:
            EngineFaultError: It failed, or did not leave with exit code 0.
        """
        if installed_version(_DISTRIBUTION) is None:
            return _NOT_INSTALLED
        async with _hung_collector() as collector, subject.serving(*collector.args) as daemon:
            if not await collector.has_spans():
                return _NOTHING_SENT
            return await stop(daemon)


@dataclass(frozen=True, slots=True)
class _Collector:
    """A server that takes spans and never answers.

    Attributes:
        args: Settings as flags of a daemon that sends its spans there.
        was_reached: Set at the first byte.
    """

    args: tuple[str, ...]
    was_reached: asyncio.Event = field(default_factory=asyncio.Event)

    async def has_spans(self) -> bool:
        """Wait for a daemon that has answered a request, and sends its spans a little later."""
        try:
            async with asyncio.timeout(GIVE_UP_S):
                await self.was_reached.wait()
        except TimeoutError:
            return False
        return True


@asynccontextmanager
async def _hung_collector() -> AsyncIterator[_Collector]:
    reached = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(65_536):
                reached.set()
        finally:
            writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        endpoint = f"http://{host}:{port}/v1/traces"
        yield _Collector(("--tracing-otlp-endpoint", endpoint), reached)


async def _answers_s(daemon: Daemon) -> list[float]:
    """Seconds that each of a few short answers takes."""
    return [(await daemon.answer(_ANSWER_TOKENS)).latency_s for _ in range(_ANSWERS)]
