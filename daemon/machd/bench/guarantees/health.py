"""Latency of ``/health`` while the daemon handles bodies that are slow to handle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from machd.bench.guarantees.bodies import Body
from machd.bench.guarantees.daemon import Daemon
from machd.bench.guarantees.guarantee import GIVE_UP_S, Obstacle
from machd.bench.level import together
from machd.bench.statistics import percentile
from machd.errors import EngineFaultError

_PATH = "/health"
_ASKED_EVERY_S = 0.01
_PERCENT = 99
_MIN_CHECKS = 100
"""Fewer have no 99th percentile; the bodies are sent again until there are as many."""


@dataclass(frozen=True, slots=True)
class HealthBeside:
    """Two senders of bodies, and a client that asks for the health; a try is its 99th percentile.

    Attributes:
        bodies_of: Bodies for a daemon's model.
    """

    name: str
    bodies_of: Callable[[Daemon], list[Body]]
    goal_s: float = 0.1

    async def try_once(self, subject: Daemon) -> float | Obstacle:
        """Send every body twice at least, by two senders in opposite order.

        Raises:
            EngineFaultError: A body got another status than it should, or ``/health`` was not 200.
        """
        bodies = self.bodies_of(subject)
        is_over = asyncio.Event()
        checks_s: list[float] = []

        async def send() -> None:
            while len(checks_s) < _MIN_CHECKS:
                await together(_send(subject, one) for one in (bodies, reversed(bodies)))
            is_over.set()

        await together((send(), _check(subject, checks_s, is_over)))
        return percentile(sorted(checks_s), _PERCENT)


async def _send(daemon: Daemon, bodies: Iterable[Body]) -> None:
    async with aclosing(daemon.connection()) as connection:
        for body in bodies:
            await body.send(connection, daemon.clock)


async def _check(daemon: Daemon, checks_s: list[float], is_over: asyncio.Event) -> None:
    """Ask again and again; a check that is under way at the end counts with all of its time."""
    try:
        async with aclosing(daemon.connection()) as connection:
            while not is_over.is_set():
                started_s = daemon.clock.monotonic_s()
                answer = await connection.exchange("GET", _PATH, timeout_s=GIVE_UP_S)
                if answer.status != 200:
                    raise EngineFaultError(f"{_PATH}: HTTP {answer.status}")
                checks_s.append(answer.ended_s - started_s)
                await asyncio.sleep(_ASKED_EVERY_S)
    except OSError as error:
        raise EngineFaultError(f"{_PATH} was not answered: {error}") from error
