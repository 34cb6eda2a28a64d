"""One level of load: so many clients, each with one request open at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from machd.bench.client import CompletionClient, Target
from machd.bench.timing import RequestTiming
from machd.bench.workload import Workload
from machd.clock import Clock

__all__ = ["Level", "LevelTimings", "run_level"]


@dataclass(frozen=True, slots=True)
class Level:
    """What is about to be measured.

    Attributes:
        mode: How the server decodes.
        index: Which level of its mode it is, so that no two share a prompt.
        concurrency: Clients.
        batch_width: Rows that the mode computes together here; None where that is not known.
    """

    mode: str
    index: int
    concurrency: int
    batch_width: int | None


@dataclass(frozen=True, slots=True)
class LevelTimings:
    """What the clients of a level noted; ``timings`` in the order in which they ended."""

    level: Level
    timings: tuple[RequestTiming, ...]

    @property
    def wall_s(self) -> float:
        """From the first request's sending to the last answer's end."""
        return max(one.ended_s for one in self.timings) - min(one.sent_s for one in self.timings)


async def run_level(
    target: Target,
    workload: Workload,
    level: Level,
    *,
    clock: Clock,
    on_request: Callable[[], None],
) -> LevelTimings:
    """Send a level's requests.

    Args:
        target: Where.
        workload: What.
        level: With how many clients.
        clock: Reads time.
        on_request: Told whenever an answer has ended.

    Raises:
        EngineFaultError: The server did not answer one of them.
    """
    count = workload.request_count(level.concurrency)
    # Made beforehand: the client should do nothing but wait while it measures.
    prompts = iter([workload.prompt(level.index, index) for index in range(count)])
    timings: list[RequestTiming] = []

    async def work(prompts: Iterator[str]) -> None:
        client = CompletionClient(target, clock)
        try:
            for prompt in prompts:
                timings.append(await client.complete(prompt, workload.max_tokens))
                on_request()
        finally:
            await client.close()

    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(level.concurrency):
                clients.create_task(work(prompts))
    except ExceptionGroup as failures:
        # The first failure cancels the other clients, and says it all.
        raise failures.exceptions[0] from None
    return LevelTimings(level, tuple(timings))
