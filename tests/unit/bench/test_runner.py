"""The order of a bench, and the ends of its scenarios."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from support.clients.measured_rows import PLAN, Unseen
from support.clocks.virtual_time import LoopClock, in_virtual_time
from support.programs.fake_openai import FakeOpenAi

from machd_bench.bench import Bench
from machd_bench.report import Row
from machd_bench.runner import Runner
from machd_bench.scenario import BATCHED, Scenario


@in_virtual_time
async def test_a_failed_scenario_leaves_its_rows_and_the_next_one() -> None:
    """A connection that breaks in the middle is told by name, and is not a silent server."""

    async def breaks(_bench: Bench) -> AsyncGenerator[Row]:
        yield Row(case="before", figures={})
        raise ConnectionResetError("hung up")

    async def runs(_bench: Bench) -> AsyncGenerator[Row]:
        yield Row(case="after", figures={})

    scenarios = [
        Scenario(name=name, about="", run=run, modes=BATCHED, columns=())
        for name, run in (("breaks", breaks), ("runs", runs))
    ]
    shown: list[str] = []
    bench = Bench(PLAN, LoopClock(), Unseen())
    runner = Runner(bench, scenarios, lambda scenario, _rows: shown.append(scenario.name))
    async with FakeOpenAi().running() as url:
        report = await runner.measure_url(url, None, None, None)

    assert shown == ["breaks", "runs"]
    assert [(row.scenario, row.mode, row.case) for row in report.rows] == [
        ("breaks", "remote", "before"),
        ("runs", "remote", "after"),
    ]
    assert report.notes == ["breaks: the server left a request unanswered: hung up"]
