"""One level of load: so many clients, each with one request open at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from machd.bench.client import ClientMaker
from machd.bench.timing import RequestTiming, wall_s
from machd.bench.workload import Workload

_WARM_UP_PROMPT_TOKENS = 8
_WARM_UP_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Level:
    """What is about to be measured.

    Attributes:
        mode: How the server decodes.
        series: Its prompts; the same in every mode.
        concurrency: Clients.
        batch_width: Rows that the mode computes together here; None where that is not known.
    """

    mode: str
    series: str
    concurrency: int
    batch_width: int | None


@dataclass(frozen=True, slots=True)
class LevelTimings:
    """What the clients of a level noted; ``timings`` in the order in which they ended."""

    level: Level
    timings: tuple[RequestTiming, ...]

    @property
    def wall_s(self) -> float:
        """From the first request's sending to the last token."""
        return wall_s(self.timings)


async def run_level(
    make_client: ClientMaker,
    workload: Workload,
    level: Level,
    *,
    on_request: Callable[[], None],
) -> LevelTimings:
    """Send a level's requests.

    Args:
        make_client: Whom to ask.
        workload: What.
        level: With how many clients.
        on_request: Told whenever an answer has ended.

    Raises:
        EngineFaultError: One of them was not answered.
    """
    count = workload.request_count(level.concurrency)
    # Made beforehand: the client should do nothing but wait while it measures.
    prompts = iter(workload.prompts(level.series, count))
    timings: list[RequestTiming] = []

    async def work(prompts: Iterator[str]) -> None:
        async with aclosing(make_client()) as client:
            for prompt in prompts:
                timings.append(await client.complete(prompt, workload.max_tokens))
                on_request()

    await together(work(prompts) for _ in range(level.concurrency))
    return LevelTimings(level, tuple(timings))


async def warm_up(make_client: ClientMaker, workload: Workload, clients: int) -> None:
    """So many short requests at once: the first batch of a width costs more than the others.

    The bare loop is warmed at every width, too.

    Raises:
        EngineFaultError: One of them was not answered.
    """
    series = f"warm-up-{clients}"

    async def work(index: int) -> None:
        prompt = workload.prompt(series, index, tokens=_WARM_UP_PROMPT_TOKENS)
        async with aclosing(make_client()) as client:
            await client.complete(prompt, _WARM_UP_TOKENS)

    await together(work(index) for index in range(clients))


async def together(coroutines: Iterable[Coroutine[object, object, object]]) -> None:
    """Run all of them at once; the first failure cancels the others, and says it all."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in coroutines:
                group.create_task(one)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
