"""Keys and values in fewer bits: what they cost in tokens/s, and how many rows more they leave room for.

A server for each format runs all the time, and the level is measured of one after the other, round
by round, so that a machine whose speed drifts slows all of them. None has a prefix cache: it is
rows that are measured.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import Struct

from machd.bench.client import CompletionClient
from machd.bench.level import Level, LevelTimings, run_level, warm_up
from machd.bench.prefix.server import CachingServer
from machd.bench.statistics import Distribution
from machd.bench.workload import Workload

KV_SPEED_GOAL = 0.9
"""The least tokens/s of affine8, over what they are as computed."""
KV_ROWS_GOAL = 1.8
"""The least rows that the same budget holds with affine8, over as many as computed."""

_FORMATS = ("none", "affine8", "affine4", "turboquant")
"""Values of ``cache.kv_quantization``."""

JUDGED_FORMAT = "affine8"
"""The format that the goals are for."""

KV_STREAMS = 16
KV_ROUNDS = 3
_LOOKED_AT_EVERY_S = 0.1


class KvFormatFigures(Struct, frozen=True, kw_only=True):
    """One format at width 16, over all rounds; ratios are to the first format.

    Attributes:
        format: As in ``cache.kv_quantization``.
        decode_mode: How the server decodes, as it says.
        completion_tokens: Of all rounds.
        generation_tps: Completion tokens of a round over its time, prompts included; the median.
        speed_ratio: A round's tokens/s over the first format's of the same round; the median.
        itl: Between tokens, in all rounds; None for answers of one token.
        bytes_per_token: What one more position costs in one row, as the server says.
        reserved_bytes: The most that the server reserved for the rows of a round; null where it
            was not seen.
        rows_ratio: Rows that the same budget holds, by what they reserve.
    """

    format: str
    decode_mode: str | None
    streams: int
    rounds: int
    completion_tokens: int
    generation_tps: float
    speed_ratio: float
    itl: Distribution | None
    bytes_per_token: int | None
    reserved_bytes: int | None
    rows_ratio: float | None


def formats_named(names: Iterable[str]) -> tuple[str, ...]:
    """Formats of these names, each once and in their order.

    Raises:
        ValueError: One of them is none; the message says which there are.
    """
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in _FORMATS:
            raise ValueError(f"{name!r} is no format; there are: {', '.join(_FORMATS)}")
    return chosen


@dataclass(slots=True)
class FormatServer:
    """A server of one format and what it has done so far."""

    format: str
    server: CachingServer
    rounds: list[LevelTimings] = field(default_factory=list)
    reserved_bytes: int = 0

    async def run(self, workload: Workload, number: int) -> None:
        """Measure a round.

        Raises:
            EngineFaultError: A request was not answered.
        """
        watching = asyncio.create_task(self._watch())
        level = Level(self.format, f"kv-{number}", KV_STREAMS, KV_STREAMS)
        make_client = partial(CompletionClient, self.server.target, self.server.clock)
        try:
            if not self.rounds:
                await warm_up(make_client, workload, KV_STREAMS)
            timings = await run_level(
                make_client, workload, level, on_request=self.server.on_answer
            )
        finally:
            watching.cancel()
            await asyncio.wait({watching})
        self.rounds.append(timings)

    @property
    def round_tps(self) -> list[float]:
        """Tokens/s of each round."""
        return [
            sum(timing.completion_tokens for timing in one.timings) / one.wall_s
            for one in self.rounds
        ]

    async def _watch(self) -> None:
        while True:
            if (reading := await self.server.kv_reading()) is not None:
                self.reserved_bytes = max(self.reserved_bytes, reading.reserved_bytes)
            await asyncio.sleep(_LOOKED_AT_EVERY_S)


async def run_kv_round(servers: Sequence[FormatServer], workload: Workload, number: int) -> None:
    """Measure every format once, with the same prompts; every other round the other way round.

    Raises:
        EngineFaultError: A request was not answered.
    """
    for one in reversed(servers) if number % 2 else servers:
        await one.run(workload, number)


def kv_format_figures(servers: Sequence[FormatServer]) -> list[KvFormatFigures]:
    """Sum up at least one round of each."""
    return [_figures(one, servers[0]) for one in servers]


def _figures(one: FormatServer, first: FormatServer) -> KvFormatFigures:
    timings = [timing for level in one.rounds for timing in level.timings]
    ratios = [mine / its for mine, its in zip(one.round_tps, first.round_tps, strict=True)]
    capabilities = one.server.target.capabilities
    cache = capabilities.cache if capabilities else None
    return KvFormatFigures(
        format=one.format,
        decode_mode=capabilities.decode_mode.active if capabilities else None,
        streams=KV_STREAMS,
        rounds=len(one.rounds),
        completion_tokens=sum(timing.completion_tokens for timing in timings),
        generation_tps=statistics.median(one.round_tps),
        speed_ratio=statistics.median(ratios),
        itl=Distribution.of(gap_s for timing in timings for gap_s in timing.gaps_s),
        bytes_per_token=cache.bytes_per_token if cache else None,
        reserved_bytes=one.reserved_bytes or None,
        rows_ratio=first.reserved_bytes / one.reserved_bytes if one.reserved_bytes else None,
    )
