"""Tries of guarantees measure a scripted server on a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from support.clocks.manual_clock import ManualClock

from machd.bench.connection import ServerAddress
from machd.bench.guarantees.bodies import Body, Refusal
from machd.bench.guarantees.cancellation import Cancellation
from machd.bench.guarantees.daemon import Daemon
from machd.bench.guarantees.guarantee import Obstacle
from machd.bench.guarantees.health import HealthBeside
from machd.bench.server import ServerProcess
from machd.bench.target import Dialect, Target
from machd.errors import EngineFaultError

BODIES = [Body(f"body {number}", "/v1/completions", b"{") for number in range(3)]


@dataclass
class Scripted:
    """A server whose answers take seconds of a manual clock.

    Attributes:
        health_s: Of each ``/health``.
        post_s: Of each refused body, in turns.
        running: Sequences that ``/metrics`` shows, one number for each look; a look takes 0.1 s.
    """

    health_s: float = 0.0
    health_status: int = 200
    post_s: list[float] = field(default_factory=lambda: [0.0])
    running: list[int] = field(default_factory=list)
    clock: ManualClock = field(default_factory=ManualClock)
    posts: int = 0
    checks: int = 0

    @asynccontextmanager
    async def running_daemon(self) -> AsyncIterator[Daemon]:
        """The server as the bench sees a daemon."""
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            address = ServerAddress("127.0.0.1", server.sockets[0].getsockname()[1], is_tls=False)
            target = Target(address, None, "m", Dialect(), None)
            yield Daemon(ServerProcess((), self.clock), target, self.clock)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                await reader.readexactly(length)
                status, body = self._answer(head.split()[1])
                writer.write(
                    f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                )
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    def _answer(self, path: str) -> tuple[int, bytes]:
        if path == "/health":
            self.checks += 1
            self.clock.advance(self.health_s)
            return self.health_status, b"{}"
        if path == "/metrics":
            self.clock.advance(0.1)
            return 200, b"machd_requests_running %d.0\n" % self.running.pop(0)
        self.clock.advance(self.post_s[self.posts % len(self.post_s)])
        self.posts += 1
        return 400, b"{}"


@pytest.mark.parametrize("health_s", [0.0, 0.25])
async def test_health_try_is_the_time_of_the_slowest_checks(health_s: float) -> None:
    """Two senders go on until 100 checks have been made, and a check's own time is the figure."""
    scripted = Scripted(health_s=health_s)
    async with scripted.running_daemon() as daemon:
        took_s = await HealthBeside("health", lambda _daemon: BODIES).try_once(daemon)

    assert took_s == pytest.approx(health_s)
    assert scripted.posts % (2 * len(BODIES)) == 0
    assert scripted.checks >= 100


async def test_health_try_fails_when_health_is_not_200() -> None:
    """A quick 503 is no healthy answer."""
    async with Scripted(health_status=503).running_daemon() as daemon:
        with pytest.raises(EngineFaultError, match="/health: HTTP 503"):
            await HealthBeside("health", lambda _daemon: BODIES).try_once(daemon)


async def test_refusal_try_is_the_slowest_body() -> None:
    """Quick refusals of other bodies do not hide a slow one."""
    async with Scripted(post_s=[0.1, 2.5, 0.2]).running_daemon() as daemon:
        took_s = await Refusal("refusal", 1.0, lambda _id: BODIES).try_once(daemon)

    assert took_s == pytest.approx(2.5)


async def test_refusal_of_chats_is_not_measured_without_a_chat_template() -> None:
    """The row gets the reason, and no body is sent."""
    scripted = Scripted()
    async with scripted.running_daemon() as daemon:
        end = await Refusal("chat", 1.0, lambda _id: BODIES, needs_chat=True).try_once(daemon)

    assert end == Obstacle("the model has no chat template")
    assert scripted.posts == 0


@pytest.mark.parametrize(
    ("running", "end"),
    [
        ([1, 1, 1, 0], 0.3),
        ([1, 0], 0.1),
        ([0], Obstacle("the stream ended before it could be cancelled")),
    ],
)
async def test_cancellation_try_lasts_until_no_sequence_runs(
    monkeypatch: pytest.MonkeyPatch, running: list[int], end: float | Obstacle
) -> None:
    """The time from cutting the stream off to the first look at which its slot is free."""
    cancelled: list[bool] = []

    @asynccontextmanager
    async def streaming(_daemon: Daemon, _count: int) -> AsyncIterator[list[asyncio.Task[bool]]]:
        task = asyncio.create_task(asyncio.Event().wait())
        try:
            yield [task]
        finally:
            cancelled.append(task.cancelling() > 0)
            task.cancel()

    monkeypatch.setattr(Daemon, "streaming", streaming)
    async with Scripted(running=running).running_daemon() as daemon:
        took_s = await Cancellation().try_once(daemon)

    assert took_s == (end if isinstance(end, Obstacle) else pytest.approx(end))
    assert cancelled == [not isinstance(end, Obstacle)]
