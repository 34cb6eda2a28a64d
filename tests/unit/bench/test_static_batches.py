"""Static batching as its clients see it, around batches that take made-up time."""

from __future__ import annotations

import asyncio

import pytest
from support.clocks.manual_clock import ManualClock

from machd.errors import EngineFaultError
from machd_bench.bench import together
from machd_bench.static_batches import StaticBatches


class TimedBatches:
    """Takes a second for a batch, and keeps what was in it."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.batches: list[list[str]] = []

    async def run(self, prompts: list[str], max_tokens: int) -> list[tuple[int, int]]:
        """Let a second go by."""
        self.batches.append(prompts)
        await asyncio.sleep(0)
        self._clock.advance(1.0)
        return [(7, max_tokens)] * len(prompts)


async def test_a_first_token_comes_with_the_end_of_its_batch() -> None:
    """Requests wait for their batch to fill; then all of them get everything at once, at its end."""
    clock = ManualClock(0.0)
    timed = TimedBatches(clock)
    static = StaticBatches(timed.run, clock)
    static.width = 2

    first = asyncio.create_task(static.ask(["a", "b"], 5))
    await asyncio.sleep(0)
    assert not timed.batches
    clock.advance(10.0)
    second = await static.ask("c", 5)

    assert timed.batches == [["a b", "c"]]
    assert (second.ttft_s, second.latency_s, second.gaps_s) == (1.0, 1.0, [])
    assert ((await first).ttft_s, (await first).latency_s) == (11.0, 11.0)
    assert (second.prompt_tokens, second.completion_tokens) == (7, 5)


async def test_a_batch_that_fails_ends_the_level() -> None:
    """One failure reaches every client that waits, as itself."""

    async def fail(_prompts: list[str], _tokens: int) -> list[tuple[int, int]]:
        raise EngineFaultError("it broke")

    static = StaticBatches(fail, ManualClock())
    static.width = 2

    with pytest.raises(EngineFaultError, match="it broke"):
        await together(static.ask(str(index), 3) for index in range(2))
