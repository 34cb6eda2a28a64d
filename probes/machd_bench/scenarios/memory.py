"""Memory by load: what MLX holds, what the process holds, and on macOS what the machine has wired.

Readings are taken while a load runs, so that the figures of a row are the most of it. The daemon reads MLX's memory once a
second and when it becomes idle, so that a load of less than a second may hold more than its row says. MLX's own peak misses nothing; it is
of the process since its start, so that it never falls from row to row.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import psutil
from prometheus_client.parser import text_string_to_metric_families

from machd_bench.bench import Bench, Mode, settled, together
from machd_bench.report import Row
from machd_bench.scenario import Scenario
from machd_bench.server import Server

STREAMS = (1, 8)
_METRIC = "machd_mlx_memory_bytes"
_READ_EVERY_S = 0.1
_SETTLED_S = 0.2


@dataclass(slots=True)
class MemoryReading:
    """The most of each during a load, in bytes.

    Attributes:
        active_bytes: Arrays that MLX holds.
        cache_bytes: Memory that MLX keeps for reuse.
        peak_bytes: The most that MLX has held since the process began.
        rss_bytes: Resident memory of the process.
        wired_bytes: What the whole machine has wired; None where the system does not say.
    """

    active_bytes: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0
    rss_bytes: int = 0
    wired_bytes: int | None = None

    async def take(self, server: Server) -> None:
        """Read once, and keep the larger of each."""
        page = (await server.exchange("/metrics")).body.decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples if family.name == _METRIC else ():
                name = f"{sample.labels['kind']}_bytes"
                setattr(self, name, max(getattr(self, name), int(sample.value)))
        if server.process is not None:
            self.rss_bytes = max(self.rss_bytes, server.process.rss_bytes())
        wired_bytes = getattr(psutil.virtual_memory(), "wired", None)
        if wired_bytes is not None:
            self.wired_bytes = max(self.wired_bytes or 0, int(wired_bytes))

    def row(self, case: str) -> Row:
        """The figures; 0 is not known."""
        return Row(
            case=case,
            figures={
                "active_bytes": self.active_bytes or None,
                "peak_bytes": self.peak_bytes or None,
                "cache_bytes": self.cache_bytes,
                "rss_bytes": self.rss_bytes or None,
                "wired_bytes": self.wired_bytes,
            },
        )


@asynccontextmanager
async def _watched(server: Server) -> AsyncIterator[MemoryReading]:
    """Read again and again until the load has ended, and then until the daemon has read what it left."""
    reading = MemoryReading()

    async def watch() -> None:
        while True:
            await reading.take(server)
            await asyncio.sleep(_READ_EVERY_S)

    watching = asyncio.create_task(watch())
    try:
        yield reading
    finally:
        watching.cancel()
        await asyncio.wait({watching})

    async def read() -> MemoryReading:
        await reading.take(server)
        return replace(reading)

    await settled(read, _SETTLED_S)


async def _memory(bench: Bench) -> AsyncGenerator[Row]:
    plan = bench.plan
    async with bench.serve() as server:
        ready = MemoryReading()
        await ready.take(server)
        yield ready.row("ready")
        for streams in STREAMS:
            bench.progress.say(f"memory, {streams} streams")
            prompts = bench.prompts(f"memory-{streams}", streams)
            async with _watched(server) as reading:
                await together(server.ask(one, plan.max_tokens) for one in prompts)
            bench.progress.advance(streams)
            yield reading.row(f"{streams} stream{'s' * (streams > 1)}")
        (prompt,) = bench.prompts("memory-long", 1, plan.long_prompt_tokens)
        async with _watched(server) as reading:
            await server.ask(prompt, plan.max_tokens)
        bench.progress.advance()
        yield reading.row("a long prompt")
        idle = MemoryReading()
        await idle.take(server)
        yield idle.row("idle again")


MEMORY = Scenario(
    name="memory",
    about="the most of each load; peak is since the start, wired is the whole machine's",
    run=_memory,
    modes=frozenset({Mode.BATCHED}),
    columns=("active_bytes", "peak_bytes", "cache_bytes", "rss_bytes", "wired_bytes"),
    streams=lambda _plan: max(STREAMS),
    requests=lambda _plan: sum(STREAMS) + 1,
    starts_servers=True,
    has_goal=False,
)
