"""Requests to an encoder without an engine: its answers are scripted."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import cast

from machd.engine.protocol.encoder import EncoderInput, InputTokenizer
from machd.engine.protocol.media import PlainArray
from machd.errors import MachdError
from machd.generations.encodings import Encoded, Encodings
from machd.generations.open_generations import GenerationLimits, OpenGenerations
from machd.generations.record import RequestRecord
from machd.process.lifecycle import Lifecycle, State
from machd.served.served_model import ServedModel
from machd.served.vector_cache import VectorCache
from support.clocks.manual_clock import ManualClock
from support.daemon.serving_parts import identity_of

LIMITS = GenerationLimits(max_tokens_default=1, max_n=1, max_queue=1, max_queue_tokens=100)


class _ScriptedModel:
    """Notes what it is asked, and answers with the first token of each text, once it is told to."""

    inputs = cast(InputTokenizer, None)

    def __init__(self) -> None:
        self.asked: list[tuple[EncoderInput, ...]] = []
        self.dropped = 0
        self.news = asyncio.Semaphore(0)
        self.load = object()
        self.vectors_bytes = 0
        self.vectors = VectorCache()
        self._answers: list[Future[PlainArray]] = []

    def kept_vectors(self) -> VectorCache:
        """Return the cache, within its bound."""
        self.vectors.hold(load=self.load, limit_bytes=self.vectors_bytes)
        return self.vectors

    async def encode(self, inputs: tuple[EncoderInput, ...]) -> PlainArray:
        """Note texts and wait for the answer."""
        self.asked.append(inputs)
        self.news.release()
        self._answers.append(Future())
        try:
            return await asyncio.wrap_future(self._answers[-1])
        except asyncio.CancelledError:
            self.dropped += 1
            raise

    def answer(self, number: int = -1) -> None:
        """Answer a question, the last one unless a number is given."""
        numbers = array("f", [float(one.token_ids[0]) for one in self.asked[number]])
        content = memoryview(numbers.tobytes())
        self._answers[number].set_result(PlainArray((len(numbers), 1), "float32", content))

    def fail(self, error: MachdError) -> None:
        """Fail the last question."""
        self._answers[-1].set_exception(error)


class ServingEncoder:
    """Requests to a scripted encoder, and what is recorded of them."""

    def __init__(self, limits: GenerationLimits = LIMITS, *, vectors_bytes: int = 0) -> None:
        """Begin with no request."""
        lifecycle = Lifecycle()
        lifecycle.become(State.READY)
        self.clock = ManualClock(100.0)
        self.records: list[RequestRecord] = []
        self.served = _ScriptedModel()
        self.served.vectors_bytes = vectors_bytes
        self.open = OpenGenerations(
            lifecycle=lifecycle, limits=limits, clock=self.clock, observers=[self]
        )
        self.encodings = Encodings(cast(ServedModel, self.served), self.open)

    def on_request(self, record: RequestRecord) -> None:
        """Keep a record."""
        self.records.append(record)

    def encode(
        self,
        *texts: Sequence[int],
        name: str = "embd",
        client: str = "anonymous",
        second_from: int | None = None,
    ) -> asyncio.Task[Encoded]:
        """Begin a request with these texts."""
        inputs = [EncoderInput(tuple(one), second_from) for one in texts]
        identity = replace(identity_of(name), client=client)
        return asyncio.create_task(self.encodings.encode(lambda _: inputs, identity))

    async def asked(self) -> None:
        """Wait until the engine is asked once more."""
        await self.served.news.acquire()
