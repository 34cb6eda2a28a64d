"""Requests that arrive one after the other: how long each waits for its first token.

The sweep's clients start together, which suits a batch that is collected beforehand. People do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from machd_bench.answer import Answer
from machd_bench.bench import Bench, Mode, together
from machd_bench.prompts import Prompt
from machd_bench.report import Goal, Row, percentiles
from machd_bench.scenario import SERVED, Scenario

STREAMS = 4
INTERVAL_S = 0.25
_ROUNDS = 2
_GOAL = 6.0
"""By how much the median first token of continuous batching is to be sooner than static's."""


async def _staggered(bench: Bench) -> AsyncGenerator[Row]:
    await bench.warm_up(STREAMS)

    async def arrive(prompt: Prompt, after_s: float) -> Answer:
        await asyncio.sleep(after_s)
        return await bench.ask(prompt)

    answers: list[Answer] = []
    for number in range(_ROUNDS):
        prompts = bench.prompts(f"staggered-{number}", STREAMS)
        arrivals = [arrive(prompt, index * INTERVAL_S) for index, prompt in enumerate(prompts)]
        answers += await together(arrivals)
    ttft = percentiles("ttft", (one.ttft_s for one in answers))
    row = Row(
        case=f"{STREAMS} requests",
        figures={
            "requests": len(answers),
            **ttft,
            **percentiles("latency", (one.latency_s for one in answers)),
        },
    )
    for earlier in bench.rows:
        if (earlier.scenario, earlier.mode) == (STAGGERED.name, Mode.STATIC):
            ratio = earlier.number("ttft_p50_s") / row.number("ttft_p50_s")
            row.figures["sooner_than_static_ratio"] = ratio
            if bench.mode is Mode.BATCHED:
                name = "first token, times sooner than static's"
                row.goals.append(Goal.judge(name, "at least", _GOAL, ratio))
    yield row


STAGGERED = Scenario(
    name="staggered",
    about=f"requests that arrive every {INTERVAL_S * 1000:.0f} ms",
    run=_staggered,
    modes=SERVED | {Mode.STATIC},
    columns=("ttft_p50_s", "ttft_p99_s", "latency_p50_s", "sooner_than_static_ratio"),
    streams=lambda _plan: STREAMS,
    requests=lambda _plan: STREAMS * _ROUNDS,
)
