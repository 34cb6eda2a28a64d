"""The delay that a hanging trace collector adds to requests and to the stop."""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from machd.bench.guarantees.daemon import Daemon, Launcher
from machd.bench.guarantees.guarantee import GIVE_UP_S, Obstacle
from machd.bench.guarantees.stop import stop
from machd.installed import installed_version

_DISTRIBUTION = "opentelemetry-exporter-otlp-proto-http"
_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: (\d+)")
_TAKEN = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_ANSWERS = 5
_ANSWER_TOKENS = 2

_NOT_INSTALLED = Obstacle("machd[otel] is not installed")
_NOTHING_SENT = Obstacle(f"the daemon sent no span within {GIVE_UP_S:g} s")


@dataclass(frozen=True, slots=True)
class CollectorDelay:
    """Answers while spans are sent to a collector that hangs; a try is by what the slowest is late.

    It is late by the seconds that it takes over the median answer while the collector answers, too.
    """

    name: str = "delay by a hung trace collector"
    goal_s: float = 1.0

    async def try_once(self, subject: Launcher) -> float | Obstacle:
        """Ask before the collector hangs, and while it does.

        Raises:
            EngineFaultError: A request was not answered.
        """
        if installed_version(_DISTRIBUTION) is None:
            return _NOT_INSTALLED
        async with _collecting() as collector, subject.serving(*collector.args) as daemon:
            usual_s = statistics.median(await _answers_s(daemon))
            collector.hang()
            if not await _is_reached(collector, daemon):
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
        async with _collecting() as collector, subject.serving(*collector.args) as daemon:
            collector.hang()
            if not await _is_reached(collector, daemon):
                return _NOTHING_SENT
            return await stop(daemon)


@dataclass(frozen=True, slots=True)
class _Collector:
    """A server that takes spans, and answers until it hangs.

    Attributes:
        endpoint: Its URL.
        held: Set at the first request that gets no answer.
    """

    endpoint: str
    hanging: asyncio.Event
    held: asyncio.Event

    @property
    def args(self) -> tuple[str, ...]:
        """Settings as flags of a daemon that sends its spans there."""
        return ("--tracing-otlp-endpoint", self.endpoint)

    def hang(self) -> None:
        """Answer no request any more."""
        self.hanging.set()


@asynccontextmanager
async def _collecting() -> AsyncIterator[_Collector]:
    hanging, held = asyncio.Event(), asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(_END_OF_HEAD)
            length = _LENGTH.search(head)
            await reader.readexactly(int(length[1]) if length else 0)
            if hanging.is_set():
                held.set()
                await reader.read()  # until the daemon closes the connection
            writer.write(_TAKEN)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the daemon has ended
        finally:
            writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        yield _Collector(f"http://{host}:{port}/v1/traces", hanging, held)


async def _is_reached(collector: _Collector, daemon: Daemon) -> bool:
    """Make a span, and wait until the daemon sends it to the collector that hangs."""
    await daemon.answer(_ANSWER_TOKENS)
    try:
        async with asyncio.timeout(GIVE_UP_S):
            await collector.held.wait()
    except TimeoutError:
        return False
    return True


async def _answers_s(daemon: Daemon) -> list[float]:
    """Seconds that each of a few short answers takes."""
    return [(await daemon.answer(_ANSWER_TOKENS)).latency_s for _ in range(_ANSWERS)]
