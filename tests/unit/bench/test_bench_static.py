"""Static batching as its clients see it, around a runner whose batches take made-up time."""

from __future__ import annotations

import asyncio

import pytest
from support.clocks.manual_clock import ManualClock

from machd.bench.ceiling import StaticAnswer, StaticQuery
from machd.bench.level import Level, run_level
from machd.bench.static import StaticBatcher
from machd.bench.workload import Workload
from machd.errors import EngineFaultError


class TimedRunner:
    """Takes a second for a batch, and keeps what was in it."""

    def __init__(self, clock: ManualClock, *, fails: bool = False) -> None:
        self._clock = clock
        self._fails = fails
        self.batches: list[StaticQuery] = []

    async def run_batch(self, query: StaticQuery) -> StaticAnswer:
        """Let a second go by."""
        if self._fails:
            raise EngineFaultError("it broke")
        self.batches.append(query)
        await asyncio.sleep(0)
        self._clock.advance(1.0)
        counts = [query.max_tokens] * len(query.prompts)
        return StaticAnswer([7] * len(counts), counts)


async def test_a_first_token_comes_with_the_end_of_its_batch() -> None:
    """Requests wait for their batch to fill; then all of them get everything at once, at its end."""
    clock = ManualClock(0.0)
    runner = TimedRunner(clock)
    batcher = StaticBatcher(runner, width=2, requests=2, clock=clock)

    first = asyncio.create_task(batcher.client().complete("a", 5))
    await asyncio.sleep(0)
    assert not runner.batches
    clock.advance(10.0)
    second = await batcher.client().complete("b", 5)

    assert (second.ttft_s, second.latency_s) == (1.0, 1.0)
    assert ((await first).ttft_s, (await first).latency_s) == (11.0, 11.0)
    assert (second.prompt_tokens, second.completion_tokens) == (7, 5)
    assert second.gaps_s == ()


async def test_every_batch_is_full_but_the_last() -> None:
    """Clients that ask again fill batch after batch; the last one does not wait for nobody."""
    clock = ManualClock(0.0)
    runner = TimedRunner(clock)
    workload = Workload(requests=8, prompt_tokens=2, max_tokens=3, seed=1)
    batcher = StaticBatcher(runner, width=3, requests=9, clock=clock)
    ended: list[None] = []

    measured = await run_level(
        batcher.client,
        workload,
        Level("static", "level-3", 3, 3),
        on_request=lambda: ended.append(None),
    )

    assert [len(batch.prompts) for batch in runner.batches] == [3, 3, 3]
    assert {one for batch in runner.batches for one in batch.prompts} == set(
        workload.prompts("level-3", 9)
    )
    assert measured.wall_s == 3.0
    assert [one.ttft_s for one in measured.timings] == [1.0] * 9
    assert len(ended) == 9

    lonely = StaticBatcher(runner, width=3, requests=4, clock=clock)
    await asyncio.gather(*(lonely.client().complete(str(index), 3) for index in range(4)))
    assert [len(batch.prompts) for batch in runner.batches[3:]] == [3, 1]


async def test_a_batch_that_fails_ends_the_level() -> None:
    """One failure reaches every client that waits, as itself."""
    clock = ManualClock()
    batcher = StaticBatcher(TimedRunner(clock, fails=True), width=2, requests=2, clock=clock)

    with pytest.raises(EngineFaultError, match="it broke"):
        await run_level(
            batcher.client,
            Workload(2, 1, 1, seed=1),
            Level("static", "level-2", 2, 2),
            on_request=lambda: None,
        )
