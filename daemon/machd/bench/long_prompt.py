"""A long prompt arrives while other streams run: what it costs them, and what they cost it.

The streams run until each has shown a number of tokens; the gaps between those, once all of them
run, are what is usual. Then the long prompt is sent. Until its first token is here, every gap that
touches that time counts, also one that began before or ended after it. A stream that shows nothing
more counts with the time for which it has been silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec import Struct

from machd.bench.client import ClientMaker
from machd.bench.sse import TimedPiece
from machd.bench.statistics import Distribution
from machd.bench.timing import RequestTiming
from machd.bench.workload import Workload
from machd.errors import EngineFaultError

LONG_PROMPT_GOAL = 2.5
"""The most by which the slowest gaps may exceed the usual one while a long prompt is computed."""

_SERIES = "long-prompt"
_LONG_SERIES = "long-prompt-itself"
_ANSWER_TOKENS = 4
"""Of the long prompt: a few after the first, so that the gaps around it can end."""


@dataclass(frozen=True, slots=True)
class LongPromptLoad:
    """What runs, and what joins it.

    Attributes:
        streams: How many run when the long prompt arrives.
        prompt_tokens: About how long it is.
        settle_tokens: Tokens of every stream before it arrives.
        max_tokens: Where the streams would end; they are cut off as soon as all is known.
    """

    streams: int = 8
    prompt_tokens: int = 1500
    settle_tokens: int = 32
    max_tokens: int = 768


class LongPromptFigures(Struct, frozen=True, kw_only=True):
    """What a long prompt does to the streams beside it.

    Attributes:
        streams: How many ran.
        prompt_tokens: Of the long prompt, as the server counted them; 0 if it did not.
        ttft_s: From its arrival to its first token.
        before: Gaps of the running streams before it arrived.
        during: Gaps of the running streams between its arrival and its first token.
        p99_ratio: The 99th percentile of ``during`` over the median of ``before``.
    """

    mode: str
    streams: int
    prompt_tokens: int
    ttft_s: float
    before: Distribution
    during: Distribution
    p99_ratio: float

    @classmethod
    def of(
        cls, mode: str, streams: Sequence[Sequence[float]], joined: RequestTiming, ended_s: float
    ) -> LongPromptFigures:
        """Sum up.

        Args:
            mode: How the server decodes.
            streams: When each running stream's tokens came; two at least.
            joined: The long prompt's request.
            ended_s: When the streams were cut off.
        """
        arrived_s, first_s = joined.sent_s, joined.text_s[0]
        running_s = max(stream[0] for stream in streams)
        gaps = [gap for stream in streams for gap in pairwise((*stream, ended_s))]
        before = Distribution.of(b - a for a, b in gaps if a >= running_s and b <= arrived_s)
        during = Distribution.of(b - a for a, b in gaps if a < first_s and b > arrived_s)
        assert during is not None, "every stream was somewhere at that time"
        if before is None:
            raise EngineFaultError("the server's streams did not run at the same time")
        return cls(
            mode=mode,
            streams=len(streams),
            prompt_tokens=joined.prompt_tokens,
            ttft_s=joined.ttft_s,
            before=before,
            during=during,
            p99_ratio=during.p99_s / before.p50_s,
        )


async def run_long_prompt(
    make_client: ClientMaker, workload: Workload, load: LongPromptLoad, *, mode: str
) -> LongPromptFigures:
    """Start the streams, let the long prompt join them, and cut them off.

    Raises:
        EngineFaultError: The server failed, or does not run so many streams together.
    """
    settled = asyncio.Semaphore(0)
    running = [_Running(load.settle_tokens, settled) for _ in range(load.streams)]
    prompts = workload.prompts(_SERIES, load.streams)
    tasks = [
        asyncio.create_task(_stream(make_client, prompt, load.max_tokens, one))
        for prompt, one in zip(prompts, running, strict=True)
    ]
    arrival = asyncio.create_task(_join(make_client, workload, load, settled))
    try:
        done, _ = await asyncio.wait({*tasks, arrival}, return_when=asyncio.FIRST_COMPLETED)
        if arrival not in done:
            for task in done:
                task.result()  # raises what ended it, if that was an error
            raise EngineFaultError(
                f"a stream ended before the long prompt had its answer: the server does not run "
                f"{load.streams + 1} streams together, or it stops at an end of text"
            )
        joined = await arrival
    finally:
        for task in (*tasks, arrival):
            task.cancel()
        await asyncio.gather(*tasks, arrival, return_exceptions=True)
    streams = [RequestTiming.read(0.0, 0.0, one.pieces).text_s for one in running]
    return LongPromptFigures.of(mode, streams, joined, joined.ended_s)


@dataclass(slots=True)
class _Running:
    """A stream that tells when it has shown enough."""

    settle_tokens: int
    settled: asyncio.Semaphore
    pieces: list[TimedPiece] = field(default_factory=list)

    def on_piece(self, piece: TimedPiece) -> None:
        self.pieces.append(piece)
        if len(self.pieces) == self.settle_tokens:
            self.settled.release()


async def _stream(
    make_client: ClientMaker, prompt: str, max_tokens: int, running: _Running
) -> None:
    async with aclosing(make_client()) as client:
        await client.complete(prompt, max_tokens, on_piece=running.on_piece)


async def _join(
    make_client: ClientMaker, workload: Workload, load: LongPromptLoad, settled: asyncio.Semaphore
) -> RequestTiming:
    prompt = workload.prompt(_LONG_SERIES, 0, tokens=load.prompt_tokens)
    async with aclosing(make_client()) as client:
        for _ in range(load.streams):
            await settled.acquire()
        return await client.complete(prompt, _ANSWER_TOKENS)
