"""Daemons that are stopped while they do something, and the seconds that it takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from machd.errors import EngineFaultError
from machd.installed import installed_version
from machd_bench.answer import Answer
from machd_bench.bench import Bench
from machd_bench.server import LOOK_UP_TIMEOUT_S, Server
from machd_guarantees.hung_collector import hung_collector

POLL_S = 0.01
STREAMS = 4
_STREAM_TOKENS = 4096
_PROMPT = "Once upon a time there was"
_TRACING = "opentelemetry-exporter-otlp-proto-http"


@asynccontextmanager
async def streaming(server: Server, count: int) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """Run long completions; one has begun on entry, and the rest are cancelled on exit."""
    began = asyncio.Event()
    assert server.capabilities is not None, "machd says what it is"
    tokens = min(_STREAM_TOKENS, server.capabilities.model.context_tokens // 2)
    tasks = [
        asyncio.create_task(
            server.ask(f"{number} {_PROMPT}", tokens, on_piece=lambda _piece: began.set())
        )
        for number in range(count)
    ]
    waiting = asyncio.create_task(began.wait())
    try:
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        if not began.is_set():
            await asyncio.gather(*(task for task in tasks if task.done()))  # raises what ended one
        yield tasks
    finally:
        for one in (*tasks, waiting):
            one.cancel()
        await asyncio.gather(*tasks, waiting, return_exceptions=True)


async def _stop(server: Server) -> float:
    """From SIGTERM to the end of the process."""
    assert server.process is not None, "started by the bench"
    started_s = server.clock.monotonic_s()
    server.process.terminate()
    await server.process.end_within(LOOK_UP_TIMEOUT_S)
    return server.clock.monotonic_s() - started_s


async def stop_idle(bench: Bench) -> float:
    """SIGTERM to a daemon that does nothing."""
    async with bench.serve() as server:
        return await _stop(server)


async def stop_draining(bench: Bench, drain_s: float, *, is_second: bool = False) -> float | str:
    """Stop a daemon whose streams run longer than this takes; the second signal, if it is that."""
    async with (
        bench.serve("--limits-drain-timeout-s", str(drain_s)) as server,
        streaming(server, STREAMS) as streams,
    ):
        assert server.process is not None, "started by the bench"
        if is_second:
            server.process.terminate()
            await _until_draining(server)
        took_s = await _stop(server)
        ends = await asyncio.gather(*streams, return_exceptions=True)
        if any(isinstance(one, EngineFaultError) for one in ends):
            return took_s
        return "all streams ended by themselves: the model is too fast for this measurement"


async def _until_draining(server: Server) -> None:
    """Return once a SIGTERM was taken; also if the port has closed by then."""
    try:
        while (await server.exchange("/health/ready")).status == 200:  # noqa: ASYNC110 - another process
            await asyncio.sleep(POLL_S)
    except OSError:
        return


async def delay_by_collector(bench: Bench, usual_s: float | None) -> float | str:
    """By what the slowest of a few answers is late while a trace collector hangs.

    Args:
        bench: Starts the daemon.
        usual_s: What such answers take without; None measures the daemon's stop instead.
    """
    if installed_version(_TRACING) is None:
        return "machd[otel] is not installed"
    async with hung_collector() as collector, bench.serve(*collector.args) as server:
        await server.ask(_PROMPT, 2)
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                await collector.was_reached.wait()
        except TimeoutError:
            return f"the daemon sent no span within {LOOK_UP_TIMEOUT_S:g} s"
        if usual_s is None:
            return await _stop(server)
        return max(0.0, max(await short_answers_s(server)) - usual_s)


async def short_answers_s(server: Server) -> list[float]:
    """Seconds that each of a few short answers takes."""
    return [(await server.ask(_PROMPT, 2)).latency_s for _ in range(5)]
