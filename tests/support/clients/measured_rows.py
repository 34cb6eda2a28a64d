"""Scenarios run against a made-up server."""

from __future__ import annotations

from machd_bench.bench import Bench, Mode, Plan
from machd_bench.connection import Address
from machd_bench.report import Row
from machd_bench.scenario import Scenario
from machd_bench.server import Server
from support.clocks.virtual_time import LoopClock
from support.programs.fake_openai import FakeOpenAi

PLAN = Plan(requests=4, prompt_tokens=4, max_tokens=8, long_prompt_tokens=100, prefix_tokens=60)


class Unseen:
    """Progress that is only counted."""

    def __init__(self) -> None:
        self.answers = 0

    def say(self, text: str) -> None:
        """Heed no text."""

    def advance(self, count: int = 1) -> None:
        """Count."""
        self.answers += count


async def rows_of(scenario: Scenario, server: FakeOpenAi, plan: Plan = PLAN) -> list[Row]:
    """The rows of a scenario at the server's URL, in virtual time."""
    async with server.running() as url:
        found = await Server.find(Address.of(url), LoopClock())
        bench = Bench(plan, LoopClock(), Unseen(), Mode.REMOTE, server=found)
        return [row async for row in scenario.run(bench)]
