"""Experts on disk: tokens/s, hit rate and bytes read, by the share of the experts that is in memory.

A server for each share runs after the other, each in as much memory as its share allows; the first has the whole
model in memory, if there is room. Where no model is named, one is made whose routing is skewed as that of
trained models is.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from machd.engine.loading.embedded import user_cache_directory
from machd.errors import StartupError
from machd.settings.sources import process_environ
from machd_bench.answer import all_gaps_s, tokens_per_second
from machd_bench.bench import Bench, Mode, together
from machd_bench.moe_checkpoint import MoeShape, write_moe_checkpoint
from machd_bench.report import Goal, Row, percentiles
from machd_bench.scenario import Scenario
from machd_bench.server import Server

SHARES = (0.1, 0.25, 0.5, 1.0)
"""Of the experts, in memory."""
STREAMS = (1, 4, 8)
_IN_MEMORY = "in memory"
_ALL_GOAL = 0.97
"""The least tokens/s with every expert in the bank, over those of the model in memory."""
_HALF_GOAL, _HALF_HITS_GOAL = 0.6, 0.9
"""With half of them, and the least share of needs that one stream finds in memory."""
_AHEAD_GOAL = 0.5
"""The least share of the misses that were read, or being read, when they were needed."""
_ROUNDS = 3


class _Bank(Struct):
    capacity_bytes: int
    hits: int
    misses: int
    bytes_read: int
    read_ahead_hits: int


class _CacheStats(Struct):
    expert_bank: _Bank | None = None


class _Experts(Struct):
    bytes: int
    other_bytes: int


class _Check(Struct):
    experts: _Experts | None = None
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Level:
    """A server's answers to so many streams at once."""

    tps: float
    row: Row


async def _level(bench: Bench, server: Server, case: str, streams: int) -> _Level:
    """Ask so many streams at once, several times, and count what the bank did meanwhile."""
    answers, tps = [], []
    before = await _bank(server)
    for number in range(_ROUNDS):
        prompts = bench.prompts(f"experts-{streams}-{number}", streams)
        # Greedy answers of random weights go round in a circle, and so do their experts.
        fields = [{"temperature": 1.0, "seed": index + 1} for index in range(streams)]
        answers.append(
            await together(
                server.ask(prompt, bench.plan.max_tokens, fields=one)
                for prompt, one in zip(prompts, fields, strict=True)
            )
        )
        tps.append(tokens_per_second(answers[-1]))
        bench.progress.advance(streams)
    after = await _bank(server)
    every = [answer for of_round in answers for answer in of_round]
    row = Row(
        case=f"{case}, {streams} streams",
        figures={
            "streams": streams,
            "tps": sorted(tps)[len(tps) // 2],
            **percentiles("ttft", (one.ttft_s for one in every)),
            **percentiles("gap", all_gaps_s(every)),
            "rss_bytes": server.process.rss_bytes() if server.process else None,
        },
    )
    if before is not None and after is not None:
        needs = after.hits - before.hits + after.misses - before.misses
        misses = after.misses - before.misses
        ahead = after.read_ahead_hits - before.read_ahead_hits
        tokens = sum(one.completion_tokens for one in every)
        row.figures |= {
            "bank_bytes": after.capacity_bytes,
            "hit_rate": 1 - misses / needs if needs else 1.0,
            "ahead_share": ahead / misses if misses else None,
            "read_bytes_per_token": (after.bytes_read - before.bytes_read) / tokens,
        }
    return _Level(row.number("tps"), row)


async def _bank(server: Server) -> _Bank | None:
    stats = await server.look_up("/v1/cache/stats", _CacheStats)
    return None if stats is None else stats.expert_bank


async def _experts(bench: Bench) -> AsyncGenerator[Row]:
    async with _model(bench) as model_args:
        found = await _check((*bench.serve_args, *model_args))
        if found.experts is None:
            raise StartupError(
                "the scenario experts needs a model with experts; name one, or none to have one made"
            )
        plain: dict[int, float] = {}
        shares = sorted(bench.plan.expert_shares or SHARES, reverse=True)
        for share in (None, *shares):
            case = _IN_MEMORY if share is None else f"{share:g} in a bank"
            wanted_bytes = found.experts.other_bytes + found.experts.bytes * (share or 1)
            if wanted_bytes > psutil.virtual_memory().available:
                bench.notes.append(f"experts: {case} left out: memory does not hold it")
                continue
            resident_gb = found.experts.bytes * (share or 0) / 1e9
            flags = () if share is None else ("--experts-resident-gb", f"{resident_gb:.6f}")
            args = (*model_args, "--no-cache-prefix", "--speculation-mode", "off", *flags)
            async with bench.serve(*args) as server:
                for streams in STREAMS:
                    level = await _level(bench, server, case, streams)
                    level.row.figures["share"] = share
                    if share is None:
                        plain[streams] = level.tps
                    elif streams in plain:
                        level.row.figures["tps_ratio"] = level.tps / plain[streams]
                        level.row.goals.extend(_goals(level.row, share, streams))
                    yield level.row


def _goals(row: Row, share: float, streams: int) -> list[Goal]:
    ratio, name = row.number("tps_ratio"), f"tokens/s over those in memory, {row.case}"
    if share == 1.0:
        return [Goal.judge(name, "at least", _ALL_GOAL, ratio)]
    if share != 0.5:
        return []
    goals = [Goal.judge(name, "at least", _HALF_GOAL, ratio)]
    if streams == 1:
        hits, ahead = row.number("hit_rate"), row.number("ahead_share")
        goals.append(Goal.judge(f"hit rate, {row.case}", "at least", _HALF_HITS_GOAL, hits))
        goals.append(Goal.judge(f"misses read ahead, {row.case}", "at least", _AHEAD_GOAL, ahead))
    return goals


@asynccontextmanager
async def _model(bench: Bench) -> AsyncIterator[Sequence[str]]:
    """The flags that name the model: none if the settings do; else it is made, and removed."""
    if bench.names_model:
        yield ()
        return
    with tempfile.TemporaryDirectory(prefix="machd-experts-") as directory:
        shape = MoeShape().with_stored_gb(bench.plan.experts_gb)
        bench.progress.say(f"writing a model with {bench.plan.experts_gb:g} GB of experts")
        cache_directory = user_cache_directory(process_environ())
        path = Path(directory) / f"experts-{bench.plan.experts_gb:g}gb"
        await asyncio.to_thread(write_moe_checkpoint, path, shape, cache_directory)
        yield ("--model-path", os.fspath(path))


async def _check(args: Sequence[str]) -> _Check:
    """Ask ``machd check`` what the experts take."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "machd", "check", "--json", *args),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, said = await process.communicate()
    try:
        return msgspec.json.decode(out, type=_Check)
    except msgspec.DecodeError:
        raise StartupError(said.decode("utf-8", "replace").removeprefix("machd: ")) from None


EXPERTS = Scenario(
    name="experts",
    about="experts on disk, by the share of them that is in memory; ratios are to the model in memory",
    run=_experts,
    modes=frozenset({Mode.CONTINUOUS}),
    columns=(
        "tps",
        "tps_ratio",
        "ttft_p50_s",
        "hit_rate",
        "ahead_share",
        "read_bytes_per_token",
        "rss_bytes",
    ),
    streams=lambda _plan: max(STREAMS),
    requests=lambda plan: (len(plan.expert_shares or SHARES) + 1) * _ROUNDS * sum(STREAMS),
    starts_servers=True,
)
