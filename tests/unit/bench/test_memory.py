"""Memory by load, on a server whose readings are made up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import psutil
import pytest
from support.clients.measured_rows import PLAN, Unseen
from support.clocks.virtual_time import LoopClock, in_virtual_time
from support.programs.fake_openai import FakeOpenAi, _head

from machd_bench.bench import Bench
from machd_bench.connection import Address
from machd_bench.scenarios.memory import MEMORY
from machd_bench.server import Server


class HoldingOpenAi(FakeOpenAi):
    """Holds 10 MB, and as much again for each open request."""

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path != "/llm/metrics":
            await super()._answer(path, body, writer)
            return
        _head(writer, 200)
        open_requests = sum(self._open.values())
        self.most = max(getattr(self, "most", 0), open_requests)
        writer.write("\n".join(self._page(open_requests)).encode())

    def _page(self, open_requests: int) -> Iterator[str]:
        yield "# TYPE machd_mlx_memory_bytes gauge"
        for kind, held in (("active", 1 + open_requests), ("peak", 1 + self.most), ("cache", 0)):
            yield f'machd_mlx_memory_bytes{{model="m",kind="{kind}"}} {held * 10_000_000}.0'
        yield ""


class Holding(Bench):
    """A bench that starts no daemon."""

    @asynccontextmanager
    async def serve(self, *args: str) -> AsyncIterator[Server]:
        """Give the server with made-up readings."""
        assert not args
        async with HoldingOpenAi(step_s=0.1).running() as url:
            yield await Server.find(Address.of(url), LoopClock())


@in_virtual_time
@pytest.mark.parametrize("wired_bytes", [None, 3_000_000])
async def test_each_load_has_the_most_that_was_held_while_it_ran(
    wired_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight streams hold nine times what none holds; wired memory is there where the system tells it."""
    machine = SimpleNamespace() if wired_bytes is None else SimpleNamespace(wired=wired_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)

    rows = [row async for row in MEMORY.run(Holding(PLAN, LoopClock(), Unseen()))]

    active = {row.case: row.number("active_bytes") / 10_000_000 for row in rows}
    assert active == {
        "ready": 1,
        "1 stream": 2,
        "8 streams": 9,
        "a long prompt": 2,
        "idle again": 1,
    }
    assert [row.number("peak_bytes") / 10_000_000 for row in rows] == [1, 2, 9, 9, 9]
    assert {row.figures["wired_bytes"] for row in rows} == {wired_bytes}
    assert {row.figures["cache_bytes"] for row in rows} == {0}
