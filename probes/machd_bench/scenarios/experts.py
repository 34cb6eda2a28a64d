"""Experts on disk: tokens/s, hit rate and bytes read, by the share of the experts in memory.

Servers run one after the other, one for each share; the first has the whole model in memory, if memory holds it. If no model
is named, one is generated whose routing is as skewed as that of trained models.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from machd.errors import StartupError
from machd.settings.sources import process_environ
from machd.user_directories import user_cache_directory
from machd_bench.answer import Answer, all_gaps_s, tokens_per_second
from machd_bench.bench import Bench, Mode, together
from machd_bench.connection import PieceListener, TimedPiece
from machd_bench.generated_checkpoint import MoeShape, sized, write_generated_checkpoint
from machd_bench.report import Goal, Row, percentiles
from machd_bench.scenario import Scenario
from machd_bench.server import Server

SHARES = (0.1, 0.25, 0.5, 1.0)
"""Shares of the experts in memory."""
STREAMS = (1, 4, 8)
_IN_MEMORY = "in memory"
_ALL_GOAL = 0.97
"""Least tokens/s with all experts in the bank, over those of the model in memory."""
_HALF_GOAL, _HALF_HITS_GOAL = 0.6, 0.9
"""Least ratio of tokens/s with half of the experts, and least hit rate while one stream decodes."""
_AHEAD_GOAL = 0.5
"""Least share of the misses that read-ahead had read, or was reading, when they were needed."""
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


def _hit_rate(before: _Bank, after: _Bank) -> float:
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return hits / (hits + misses) if hits + misses else 1.0


@dataclass(slots=True)
class _Round:
    """Streams that are asked together.

    Attributes:
        decoding: The bank once every stream has a token; None if it has none.
    """

    answers: list[Answer]
    decoding: _Bank | None


async def _round(bench: Bench, server: Server, number: int, streams: int) -> _Round:
    """Ask so many streams at once, and read the bank as soon as each has a token."""
    begun = asyncio.Event()
    waiting = set(range(streams))

    def listener(index: int) -> PieceListener:
        def on_piece(_piece: TimedPiece) -> None:
            waiting.discard(index)
            if not waiting:
                begun.set()

        return on_piece

    async def read_bank() -> _Bank | None:
        await begun.wait()
        return await _bank(server)

    reading = asyncio.create_task(read_bank())
    try:
        answers = await together(
            server.ask(
                prompt,
                bench.plan.max_tokens,
                # Greedy answers of random weights soon repeat themselves, and so do their experts.
                fields={"temperature": 1.0, "seed": index + 1},
                on_piece=listener(index),
            )
            for index, prompt in enumerate(bench.prompts(f"experts-{streams}-{number}", streams))
        )
        return _Round(answers, await reading)
    finally:
        reading.cancel()


async def _level(bench: Bench, server: Server, case: str, streams: int) -> Row:
    """Ask so many streams at once, in several rounds."""
    rounds: list[_Round] = []
    decode_hit_rates: list[float] = []
    first = last = await _bank(server)
    for number in range(_ROUNDS):
        rounds.append(await _round(bench, server, number, streams))
        last = await _bank(server)
        if last is not None and rounds[-1].decoding is not None:
            decode_hit_rates.append(_hit_rate(rounds[-1].decoding, last))
        bench.progress.advance(streams)
    answers = [answer for one in rounds for answer in one.answers]
    row = Row(
        case=f"{case}, {streams} streams",
        figures={
            "streams": streams,
            "tps": statistics.median(tokens_per_second(one.answers) for one in rounds),
            **percentiles("ttft", (one.ttft_s for one in answers)),
            **percentiles("gap", all_gaps_s(answers)),
            "rss_bytes": server.process.rss_bytes() if server.process else None,
        },
    )
    if first is not None and last is not None:
        misses = last.misses - first.misses
        ahead = last.read_ahead_hits - first.read_ahead_hits
        row.figures |= {
            "bank_bytes": last.capacity_bytes,
            "overall_hit_rate": _hit_rate(first, last),
            "decode_hit_rate": statistics.median(decode_hit_rates),
            "ahead_share": ahead / misses if misses else None,
            "read_bytes_per_token": (last.bytes_read - first.bytes_read)
            / sum(one.completion_tokens for one in answers),
        }
    return row


async def _bank(server: Server) -> _Bank | None:
    stats = await server.look_up("/v1/cache/stats", _CacheStats)
    return None if stats is None else stats.expert_bank


async def _experts(bench: Bench) -> AsyncGenerator[Row]:
    async with _model(bench) as model_args:
        whole = await _check((*bench.serve_args, *model_args))
        found = await _check((*bench.serve_args, *model_args, "--streaming"))
        if found.experts is None:
            raise StartupError(
                "the scenario experts needs a model with experts; name one, or leave MODEL out to generate one"
            )
        plain: dict[int, float] = {}
        shares = sorted(bench.plan.expert_shares or SHARES, reverse=True)
        for share in (None, *shares):
            case = _IN_MEMORY if share is None else f"{share:g} in a bank"
            bank_bytes = found.experts.bytes * (share or 0)
            wanted_bytes = found.experts.other_bytes + bank_bytes if share else whole.weights_bytes
            if wanted_bytes > psutil.virtual_memory().available:
                bench.notes.append(f"experts: {case} left out: memory does not hold it")
                continue
            flags = () if share is None else ("--experts-resident-gb", f"{bank_bytes / 1e9:.6f}")
            args = (*model_args, "--no-cache-prefix", "--speculation-mode", "off", *flags)
            async with bench.serve(*args) as server:
                for streams in STREAMS:
                    row = await _level(bench, server, case, streams)
                    row.figures["share"] = share
                    if share is None:
                        plain[streams] = row.number("tps")
                    elif streams in plain:
                        row.figures["tps_ratio"] = row.number("tps") / plain[streams]
                        row.goals.extend(_goals(row, share, streams))
                    yield row


def _goals(row: Row, share: float, streams: int) -> list[Goal]:
    ratio, name = row.number("tps_ratio"), f"tokens/s over those in memory, {row.case}"
    if share == 1.0:
        return [Goal.judge(name, "at least", _ALL_GOAL, ratio)]
    if share != 0.5:
        return []
    goals = [Goal.judge(name, "at least", _HALF_GOAL, ratio)]
    if streams == 1:
        hits, ahead = row.number("decode_hit_rate"), row.number("ahead_share")
        goals.append(Goal.judge(f"decode hit rate, {row.case}", "at least", _HALF_HITS_GOAL, hits))
        goals.append(Goal.judge(f"misses read ahead, {row.case}", "at least", _AHEAD_GOAL, ahead))
    return goals


@asynccontextmanager
async def _model(bench: Bench) -> AsyncIterator[Sequence[str]]:
    """Yield the flags that name the model; one that is generated is removed afterwards."""
    if bench.names_model:
        yield ()
        return
    with tempfile.TemporaryDirectory(prefix="machd-experts-") as directory:
        shape = sized(MoeShape(), bench.plan.experts_gb)
        bench.progress.say(f"writing a model with {bench.plan.experts_gb:g} GB of experts")
        cache_directory = user_cache_directory(process_environ())
        path = Path(directory) / f"experts-{bench.plan.experts_gb:g}gb"
        await asyncio.to_thread(write_generated_checkpoint, path, shape, cache_directory)
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
    about="experts on disk, by the share of them in memory; ratios are to the model in memory",
    run=_experts,
    modes=frozenset({Mode.BATCHED}),
    columns=(
        "tps",
        "tps_ratio",
        "ttft_p50_s",
        "decode_hit_rate",
        "ahead_share",
        "read_bytes_per_token",
        "rss_bytes",
    ),
    streams=lambda _plan: max(STREAMS),
    requests=lambda plan: (len(plan.expert_shares or SHARES) + 1) * _ROUNDS * sum(STREAMS),
    starts_servers=True,
)
