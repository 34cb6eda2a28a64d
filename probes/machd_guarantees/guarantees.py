"""Promises in seconds, measured on daemons of the bench's own; the worst try decides."""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from machd.errors import EngineFaultError
from machd_bench.bench import Bench, Mode, together
from machd_bench.report import Goal, Row
from machd_bench.scenario import Scenario
from machd_bench.server import LOOK_UP_TIMEOUT_S, Server
from machd_guarantees.hostile_bodies import (
    Body,
    bad_schemas,
    heavy_bodies,
    heavy_conversations,
    malformed_bodies,
)
from machd_guarantees.stops import (
    POLL_S,
    STREAMS,
    delay_by_collector,
    short_answers_s,
    stop_draining,
    stop_idle,
    streaming,
)

_TRIES = 3
_CHECKS = 100
"""Fewer have no 99th percentile; the bodies are sent again until there are as many."""
_RUNNING = re.compile(rb"^machd_requests_running\{.*\} (\S+)$", re.MULTILINE)

_Try: TypeAlias = Callable[[], Awaitable[float | str]]
"""Measures once: seconds, or why they cannot be measured here."""


async def _health_beside(server: Server, bodies: Sequence[Body]) -> float:
    """The 99th percentile of ``/health`` while two clients send the bodies in opposite order."""
    checks_s: list[float] = []
    is_over = asyncio.Event()

    async def send_all(ordered: Iterable[Body]) -> None:
        for body in ordered:
            await body.send(server)

    async def send() -> None:
        while len(checks_s) < _CHECKS:
            await together(send_all(one) for one in (bodies, bodies[::-1]))
        is_over.set()

    async def check() -> None:
        while not is_over.is_set():
            started_s = server.clock.monotonic_s()
            answer = await server.exchange("/health")
            if answer.status != 200:
                raise EngineFaultError(f"/health: HTTP {answer.status}")
            checks_s.append(answer.ended_s - started_s)
            await asyncio.sleep(POLL_S)

    await together((send(), check()))
    return float(np.percentile(checks_s, 99))


async def _slowest(server: Server, bodies: Sequence[Body]) -> float:
    return max([await body.send(server) for body in bodies])


async def _cancel(server: Server) -> float | str:
    """From the end of a stream's client until ``/metrics`` shows no running sequence."""
    async with streaming(server, 1) as (stream,):
        if not await _running(server):
            return "the stream ended before it could be cancelled"
        started_s = server.clock.monotonic_s()
        stream.cancel()
        gives_up_s = started_s + LOOK_UP_TIMEOUT_S
        while server.clock.monotonic_s() < gives_up_s and await _running(server):  # noqa: ASYNC110 - another process
            await asyncio.sleep(POLL_S)
        return server.clock.monotonic_s() - started_s


async def _running(server: Server) -> int:
    sample = _RUNNING.search((await server.exchange("/metrics")).body)
    if sample is None:
        raise EngineFaultError("/metrics: machd_requests_running is missing")
    return int(float(sample[1]))


def _of_requests(server: Server) -> list[tuple[str, float, _Try]]:
    model_id = server.model_id
    has_chat = server.capabilities is not None and server.capabilities.features.chat
    malformed, bad = malformed_bodies(model_id), bad_schemas(model_id)
    heavy, chats = heavy_bodies(model_id), heavy_conversations(model_id) if has_chat else []

    async def chat() -> float | str:
        return await _slowest(server, chats) if chats else "the model has no chat template"

    return [
        ("/health beside bad bodies, p99", 0.1, partial(_health_beside, server, malformed + bad)),
        ("/health beside 2 MB bodies, p99", 0.1, partial(_health_beside, server, heavy + chats)),
        ("a malformed body is refused", 1.0, partial(_slowest, server, malformed)),
        ("a bad schema is refused", 1.0, partial(_slowest, server, bad)),
        ("a 2 MB body is answered", 5.0, partial(_slowest, server, heavy)),
        ("a 2 MB chat is answered", 5.0, chat),
        ("a cancelled stream frees a slot", 1.0, partial(_cancel, server)),
    ]


def _of_stops(bench: Bench, usual_s: float) -> list[tuple[str, float, _Try]]:
    second = partial(stop_draining, bench, 3600.0, is_second=True)
    return [
        ("SIGTERM ends an idle daemon", 3.0, partial(stop_idle, bench)),
        ("SIGTERM ends streams, 2 s drain", 3.0, partial(stop_draining, bench, 2.0)),
        ("a second SIGTERM ends a drain", 1.0, second),
        ("delay by a hung trace collector", 1.0, partial(delay_by_collector, bench, usual_s)),
        ("SIGTERM, hung trace collector", 5.0, partial(delay_by_collector, bench, None)),
    ]


async def _guarantees(bench: Bench) -> AsyncGenerator[Row]:
    async with bench.serve() as server:
        for promise in _of_requests(server):
            yield await measure(bench, *promise)
        usual_s = statistics.median(await short_answers_s(server))
    for promise in _of_stops(bench, usual_s):
        yield await measure(bench, *promise)


async def measure(bench: Bench, name: str, goal_s: float, try_once: _Try) -> Row:
    """Repeat a try; the worst one decides, and one that cannot be measured ends it all."""
    bench.progress.say(name)
    tries = [await try_once() for _ in range(_TRIES)]
    bench.progress.advance(_TRIES)
    reasons = [one for one in tries if isinstance(one, str)]
    times_s = [] if reasons else [one for one in tries if isinstance(one, float)]
    bench.notes += [f"{name}: {reason}" for reason in reasons[:1]]
    worst_s = max(times_s, default=None)
    return Row(
        case=name,
        figures={
            "goal_s": goal_s,
            "p50_s": statistics.median(times_s) if times_s else None,
            "worst_s": worst_s,
            "tries": len(times_s),
        },
        goals=[Goal.judge(name, "at most", goal_s, worst_s, unit="s")],
    )


GUARANTEES = Scenario(
    name="guarantees",
    about="what machd promises in seconds, the worst of three tries",
    run=_guarantees,
    modes=frozenset({Mode.SETTINGS}),
    columns=("goal_s", "p50_s", "worst_s", "tries"),
    streams=lambda _plan: STREAMS,
    requests=lambda _plan: 12 * _TRIES,
    starts_servers=True,
)
