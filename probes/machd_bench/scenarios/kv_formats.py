"""Keys and values in fewer bits: what they cost in tokens/s, and how many more rows they leave room for.

A server for each format runs all the time, and the level is measured of one after the other, round
by round, so that a machine whose speed drifts slows all of them. None has a prefix cache: it is
rows that are measured.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain

from msgspec import Struct

from machd.errors import StartupError
from machd_bench.answer import Answer, all_gaps_s, tokens_per_second
from machd_bench.bench import Bench, Mode, together
from machd_bench.prompts import Prompt
from machd_bench.report import Goal, Row, percentiles
from machd_bench.scenario import Scenario
from machd_bench.server import Server

FORMATS = ("none", "affine8", "affine4", "turboquant")
"""Values of ``cache.kv_quantization``."""
STREAMS = 16
_JUDGED = "affine8"
_SPEED_GOAL = 0.9
"""The least tokens/s of affine8, over the first format's."""
_ROWS_GOAL = 1.8
"""The least rows that the same budget holds with affine8, over the first format's."""
_ROUNDS = 3
_LOOKED_AT_EVERY_S = 0.1


class _KvStats(Struct):
    reserved_bytes: int


class _CacheStats(Struct):
    kv: _KvStats


@dataclass(slots=True)
class _Format:
    name: str
    server: Server
    rounds: list[list[Answer]] = field(default_factory=list)
    reserved_bytes: int = 0

    async def run(self, prompts: list[Prompt], tokens: int) -> None:
        watching = asyncio.create_task(self._watch())
        try:
            self.rounds.append(await together(self.server.ask(one, tokens) for one in prompts))
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _watch(self) -> None:
        while True:
            if (stats := await self.server.look_up("/v1/cache/stats", _CacheStats)) is not None:
                self.reserved_bytes = max(self.reserved_bytes, stats.kv.reserved_bytes)
            await asyncio.sleep(_LOOKED_AT_EVERY_S)

    @property
    def round_tps(self) -> list[float]:
        return [tokens_per_second(answers) for answers in self.rounds]

    def row(self, first: _Format) -> Row:
        ratios = [one / its for one, its in zip(self.round_tps, first.round_tps, strict=True)]
        facts = self.server.capabilities
        cache = facts.cache if facts else None
        rows_ratio = first.reserved_bytes / self.reserved_bytes if self.reserved_bytes else None
        row = Row(
            case=self.name,
            figures={
                "decode_mode": facts.decode_mode.active if facts else None,
                "tps": statistics.median(self.round_tps),
                "tps_ratio": statistics.median(ratios),
                **percentiles("gap", all_gaps_s(chain(*self.rounds))),
                "token_bytes": cache.bytes_per_token if cache else None,
                "reserved_bytes": self.reserved_bytes or None,
                "rows_ratio": rows_ratio,
            },
        )
        if self.name == _JUDGED:
            name, tps_ratio = f"tokens/s of {_JUDGED} over {first.name}", row.number("tps_ratio")
            row.goals.append(Goal.judge(name, "at least", _SPEED_GOAL, tps_ratio))
            name = f"rows of {_JUDGED} in as much memory"
            row.goals.append(Goal.judge(name, "at least", _ROWS_GOAL, rows_ratio))
        return row


async def _kv_formats(bench: Bench) -> AsyncGenerator[Row]:
    formats: list[_Format] = []
    async with AsyncExitStack() as stack:
        for name in bench.plan.kv_formats or FORMATS[:2]:
            if formats and not bench.has_room(formats[0].server, name):
                break
            args = ("--no-cache-prefix", "--cache-kv-quantization", name)
            try:
                server = await stack.enter_async_context(bench.serve(*args))
            except StartupError as error:
                bench.notes.append(f"{name} left out: {error}")
                continue
            formats.append(_Format(name, server))
            await together(server.ask(one, 3) for one in bench.prompts("kv-warm-up", STREAMS, 8))
        for number in range(_ROUNDS):
            bench.progress.say(f"{STREAMS} streams, round {number + 1}")
            prompts = bench.prompts(f"kv-{number}", STREAMS)
            for one in reversed(formats) if number % 2 else formats:
                await one.run(prompts, bench.plan.max_tokens)
                bench.progress.advance(STREAMS)
    for one in formats:
        yield one.row(formats[0])


KV_FORMATS = Scenario(
    name="kv-formats",
    about=f"{STREAMS} streams with keys and values in each format; ratios are to the first one",
    run=_kv_formats,
    modes=frozenset({Mode.BATCHED}),
    columns=("decode_mode", "tps", "tps_ratio", "gap_p50_s", "token_bytes", "rows_ratio"),
    streams=lambda _plan: STREAMS,
    requests=lambda plan: len(plan.kv_formats or FORMATS[:2]) * _ROUNDS * STREAMS,
    starts_servers=True,
)
