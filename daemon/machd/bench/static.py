"""Static batching as its clients see it: a batch is collected, runs to its end, and answers.

mlx-lm's ``batch_generate`` takes a list of prompts and returns when the last of them is done. So
requests are collected until there is one from every client, run as one batch, and are answered
together. A request's first token is there when its batch has ended, and it may have waited for
others to join it and for the batch before. There is no HTTP: what is measured is the best that a
server around such a batch could do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from machd.bench.ceiling import StaticAnswer, StaticQuery
from machd.bench.connection import PieceListener
from machd.bench.timing import RequestTiming
from machd.clock import Clock


class BatchRunner(Protocol):
    """What a :class:`machd.bench.ceiling.CeilingProcess` does for a batch."""

    async def run_batch(self, query: StaticQuery) -> StaticAnswer:
        """Run one batch to its end."""
        ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    prompt: str
    max_tokens: int
    sent_s: float
    answered: asyncio.Future[RequestTiming]


class StaticBatcher:
    """Collects requests into batches; :meth:`client` makes those who ask."""

    def __init__(self, runner: BatchRunner, *, width: int, requests: int, clock: Clock) -> None:
        """Prepare; nothing is collected yet.

        Args:
            runner: Runs the batches.
            width: Requests that make a batch.
            requests: How many there will be in all; the last batch does not wait for more.
            clock: Reads time.
        """
        self._runner = runner
        self._width = width
        self._left = requests
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._turn = asyncio.Lock()

    def client(self) -> StaticClient:
        """Somebody whose requests go into these batches."""
        return StaticClient(self)

    async def submit(self, prompt: str, max_tokens: int) -> RequestTiming:
        """Wait for a batch to fill, and for its end.

        Raises:
            EngineFaultError: The process failed.
        """
        answered: asyncio.Future[RequestTiming] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(prompt, max_tokens, self._clock.monotonic_s(), answered))
        if len(self._waiting) == min(self._width, self._left):
            batch, self._waiting = self._waiting, []
            self._left -= len(batch)
            # Its last request runs a batch: if that fails, the bench ends with its error.
            await self._run(batch)
        return await answered

    async def _run(self, batch: list[_Waiting]) -> None:
        query = StaticQuery(
            prompts=[one.prompt for one in batch],
            max_tokens=max(one.max_tokens for one in batch),
        )
        async with self._turn:
            answer = await self._runner.run_batch(query)
        ended_s = self._clock.monotonic_s()
        counts = zip(answer.prompt_tokens, answer.completion_tokens, strict=True)
        for one, (prompt_tokens, completion_tokens) in zip(batch, counts, strict=True):
            one.answered.set_result(
                RequestTiming(one.sent_s, ended_s, (ended_s,), prompt_tokens, completion_tokens)
            )


class StaticClient:
    """One client of static batching."""

    def __init__(self, batcher: StaticBatcher) -> None:
        """Prepare."""
        self._batcher = batcher

    async def complete(
        self,
        prompt: str,
        max_tokens: int,
        *,
        schema: Mapping[str, object] | None = None,
        on_piece: PieceListener | None = None,
    ) -> RequestTiming:
        """Ask; nothing comes before the end, so there are no pieces to tell of."""
        assert schema is None, "batch_generate knows no schemas, so the mode is not asked for them"
        del on_piece
        return await self._batcher.submit(prompt, max_tokens)

    async def aclose(self) -> None:
        """There is nothing to let go of."""
