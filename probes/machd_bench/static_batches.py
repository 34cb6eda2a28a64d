"""Static batching as its clients see it: a batch is collected, runs to its end, and answers.

mlx-lm's ``batch_generate`` takes a list of prompts and returns when the last of them is done. A
request's first token is there when its batch has ended, and it may have waited for others to join it
and for the batch before. There is no HTTP: what is measured is the best that a server around such a
batch could do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from machd.clock import Clock
from machd_bench.answer import Answer
from machd_bench.prompts import Prompt


class StaticBatches:
    """Collects requests into batches.

    Attributes:
        width: Requests that make a batch; set before they are sent.
    """

    def __init__(
        self, run_batch: Callable[[list[str], int], Awaitable[list[tuple[int, int]]]], clock: Clock
    ) -> None:
        """Prepare for batches as :meth:`machd_bench.bare_model.BareModel.run_batch` runs them."""
        self._run_batch = run_batch
        self._clock = clock
        self._waiting: list[tuple[str, float, asyncio.Future[Answer]]] = []
        self._turn = asyncio.Lock()
        self.width = 1

    async def ask(
        self,
        prompt: str | Prompt,
        max_tokens: int,
        *,
        fields: object = None,
        on_piece: object = None,
    ) -> Answer:
        """Wait for a batch to fill, and for its end; nothing comes before it.

        Raises:
            EngineFaultError: The process that runs the batch failed.
        """
        assert not fields, "batch_generate knows nothing of them, so the mode is not asked for them"
        del on_piece
        text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, self._clock.monotonic_s(), answered))
        if len(self._waiting) == self.width:
            batch, self._waiting = self._waiting, []
            # Its last request runs a batch: if that fails, the bench ends with its error.
            async with self._turn:
                counts = await self._run_batch([text for text, _, _ in batch], max_tokens)
            ended_s = self._clock.monotonic_s()
            for (_, sent_s, future), count in zip(batch, counts, strict=True):
                future.set_result(Answer(sent_s, ended_s, (ended_s,), *count))
        return await answered
