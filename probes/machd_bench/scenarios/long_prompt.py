"""A long prompt arrives while other streams run: what it costs them, and what they cost it.

The streams run until each has shown a number of tokens; the gaps between those, once all of them
run, are what is usual. Then the long prompt is sent. Until its first token is here, every gap that
touches that time counts, also one that began before or ended after it. A stream that shows nothing
more counts with the time for which it has been silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from itertools import pairwise

from machd.errors import EngineFaultError
from machd_bench.answer import Answer, text_times
from machd_bench.bench import Bench
from machd_bench.connection import TimedPiece
from machd_bench.prompts import Prompt
from machd_bench.report import Goal, Row, percentiles
from machd_bench.scenario import BATCHED, Scenario

STREAMS = 8
_SETTLE_TOKENS = 32
"""Of every stream before the long prompt arrives."""
_MAX_TOKENS = 768
"""Tokens after which the streams would end; they are cut off as soon as all is known."""
ANSWER_TOKENS = 4
"""Of the request that joins: a few after the first, so that the gaps around it can end."""
_GOAL = 2.5
"""The most by which the slowest gaps may exceed the usual one while a long prompt is computed."""


async def _long_prompt(bench: Bench) -> AsyncGenerator[Row]:
    async def join() -> Answer:
        (prompt,) = bench.prompts("long-prompt-itself", 1, bench.plan.long_prompt_tokens)
        return await bench.ask(prompt, ANSWER_TOKENS)

    yield await measure_join(
        bench, "long-prompt", join, what="the long prompt", max_tokens=_MAX_TOKENS
    )


async def measure_join(
    bench: Bench,
    series: str,
    join: Callable[[], Awaitable[Answer]],
    *,
    what: str,
    max_tokens: int,
) -> Row:
    """Send a request once the streams have shown some tokens, and cut them off after its answer.

    Args:
        bench: Its server runs the streams.
        series: Of their prompts.
        join: Sends the request.
        what: The request, for the error of streams that end too early.
        max_tokens: Of each stream.

    Raises:
        EngineFaultError: A stream ended before the answer was here.
    """
    settled = asyncio.Semaphore(0)
    streams: list[list[TimedPiece]] = [[] for _ in range(STREAMS)]

    async def stream(prompt: Prompt, pieces: list[TimedPiece]) -> Answer:
        def on_piece(piece: TimedPiece) -> None:
            pieces.append(piece)
            if len(pieces) == _SETTLE_TOKENS:
                settled.release()

        return await bench.ask(prompt, max_tokens, on_piece=on_piece)

    async def join_settled() -> Answer:
        for _ in streams:
            await settled.acquire()
        return await join()

    prompts = bench.prompts(series, STREAMS)
    running = [asyncio.create_task(stream(*pair)) for pair in zip(prompts, streams, strict=True)]
    joining = asyncio.create_task(join_settled())
    try:
        done, _ = await asyncio.wait({*running, joining}, return_when=asyncio.FIRST_COMPLETED)
        if joining not in done:
            [task.result() for task in done]  # raises what ended it, if that was an error
            raise EngineFaultError(
                f"a stream ended before {what} had its answer: the server does not run "
                f"{STREAMS + 1} streams together, or it stops at an end of text"
            )
        joined = await joining
    finally:
        for task in (*running, joining):
            task.cancel()
        await asyncio.gather(*running, joining, return_exceptions=True)
    return row_of([text_times(pieces) for pieces in streams], joined)


def row_of(streams: Sequence[Sequence[float]], joined: Answer) -> Row:
    """Sum up when each stream's tokens came, which were cut off with the end of ``joined``."""
    arrived_s, first_s = joined.sent_s, joined.text_s[0]
    running_s = max(times[0] for times in streams)
    gaps = [gap for times in streams for gap in pairwise((*times, joined.ended_s))]
    before = [b - a for a, b in gaps if a >= running_s and b <= arrived_s]
    during = [b - a for a, b in gaps if a < first_s and b > arrived_s]
    if not before:
        raise EngineFaultError("the server's streams did not run at the same time")
    figures = percentiles("before_gap", before) | percentiles("during_gap", during)
    row = Row(
        case=f"{joined.prompt_tokens or 'many'} tokens join {len(streams)} streams",
        figures={
            "streams": len(streams),
            "prompt_tokens": joined.prompt_tokens,
            "ttft_s": joined.ttft_s,
            **figures,
        },
        samples={
            "gap_ended_s": [b - arrived_s for _, b in gaps],
            "gap_s": [b - a for a, b in gaps],
        },
    )
    ratio = row.number("during_gap_p99_s") / row.number("before_gap_p50_s")
    row.figures["p99_ratio"] = ratio
    longest_s = max(during, default=0.0)
    row.figures |= {
        "longest_gap_s": longest_s,
        "longest_ratio": longest_s / row.number("before_gap_p50_s"),
    }
    row.goals.append(
        Goal.judge("p99 gap meanwhile over median gap before", "at most", _GOAL, ratio)
    )
    return row


LONG_PROMPT = Scenario(
    name="long-prompt",
    about="a long prompt joins running streams; gaps between their tokens before and during it",
    run=_long_prompt,
    modes=BATCHED,
    columns=("ttft_s", "before_gap_p50_s", "during_gap_p50_s", "during_gap_p99_s", "p99_ratio"),
    streams=lambda _plan: STREAMS + 1,
    requests=lambda _plan: 1,
)
