"""Requests that arrive one after the other: how long each waits for its first token.

The sweep's clients start together, which suits a batch that is collected beforehand. People do
not: here each request arrives a fixed time after the one before, whatever has become of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from msgspec import Struct

from machd.bench.client import ClientMaker
from machd.bench.level import together
from machd.bench.statistics import Distribution
from machd.bench.timing import RequestTiming
from machd.bench.workload import Workload

STAGGERED_GOAL = 6.0
"""By how much the median first token of continuous batching is to be sooner than static's."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests arrive.

    Attributes:
        streams: Requests of a round.
        interval_s: Between two of them.
        rounds: How often; a round begins when the one before has been answered.
    """

    streams: int = 4
    interval_s: float = 0.25
    rounds: int = 2

    @property
    def requests(self) -> int:
        """Of all rounds."""
        return self.streams * self.rounds


@dataclass(frozen=True, slots=True)
class StaggeredTimings:
    """What the clients of one mode noted."""

    mode: str
    timings: tuple[RequestTiming, ...]


class StaggeredFigures(Struct, frozen=True, kw_only=True):
    """One mode under staggered arrivals.

    Attributes:
        ttft: From a request's arrival to its first token.
        latency: From a request's arrival to the end of its answer.
        static_ttft_ratio: Median ``ttft`` of the mode ``static`` in the same run over this
            mode's: how many times sooner the first token is here. None without that mode.
    """

    mode: str
    streams: int
    interval_s: float
    requests: int
    ttft: Distribution
    latency: Distribution
    static_ttft_ratio: float | None


async def run_staggered(
    make_client: ClientMaker,
    workload: Workload,
    arrivals: Arrivals,
    *,
    on_request: Callable[[], None],
) -> tuple[RequestTiming, ...]:
    """Send every round's requests.

    Raises:
        EngineFaultError: One of them was not answered.
    """
    timings: list[RequestTiming] = []

    async def arrive(prompt: str, index: int) -> None:
        async with aclosing(make_client()) as client:
            await asyncio.sleep(index * arrivals.interval_s)
            timings.append(await client.complete(prompt, workload.max_tokens))
            on_request()

    for number in range(arrivals.rounds):
        prompts = workload.prompts(f"staggered-{number}", arrivals.streams)
        await together(arrive(prompt, index) for index, prompt in enumerate(prompts))
    return tuple(timings)


def staggered_figures(
    measured: Iterable[StaggeredTimings], arrivals: Arrivals, *, static: str
) -> list[StaggeredFigures]:
    """Sum up every mode, and hold it against static batching.

    Args:
        measured: The modes.
        arrivals: How their requests arrived.
        static: Name of the mode of static batching.
    """
    ttfts: dict[str, Distribution] = {}
    latencies: dict[str, Distribution] = {}
    for one in measured:
        ttfts[one.mode] = Distribution.of_some(timing.ttft_s for timing in one.timings)
        latencies[one.mode] = Distribution.of_some(timing.latency_s for timing in one.timings)
    return [
        StaggeredFigures(
            mode=mode,
            streams=arrivals.streams,
            interval_s=arrivals.interval_s,
            requests=ttft.count,
            ttft=ttft,
            latency=latencies[mode],
            static_ttft_ratio=ttfts[static].p50_s / ttft.p50_s if static in ttfts else None,
        )
        for mode, ttft in ttfts.items()
    ]
