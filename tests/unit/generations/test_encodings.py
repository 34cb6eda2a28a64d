"""Texts of a request on their way through an encoder: equal ones once, limits, deadlines, ends."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import cast

import pytest
from support.clocks.manual_clock import ManualClock
from support.daemon.serving_parts import identity_of

from machd.engine.protocol.encoder import EncoderInput, InputTokenizer
from machd.engine.protocol.media import PlainArray
from machd.errors import (
    DrainDeadlineError,
    EngineFaultError,
    InvalidRequestError,
    KeyLimitError,
    MachdError,
    OperatorAbortError,
    QueueFullError,
    RequestTimeoutError,
)
from machd.generations.encodings import Encoded, Encodings
from machd.generations.open_generations import GenerationLimits, OpenGenerations
from machd.generations.record import RequestRecord
from machd.process.lifecycle import Lifecycle, State
from machd.served.served_model import ServedModel

_LIMITS = GenerationLimits(max_tokens_default=1, max_n=1, max_queue=1, max_queue_tokens=100)


class _Served:
    """Notes what it is asked, and answers with the first token of each text, once it is told to."""

    inputs = cast(InputTokenizer, None)

    def __init__(self) -> None:
        self.asked: list[tuple[EncoderInput, ...]] = []
        self.dropped = 0
        self.news = asyncio.Semaphore(0)
        self._answers: list[Future[PlainArray]] = []

    async def encode(self, inputs: tuple[EncoderInput, ...]) -> PlainArray:
        self.asked.append(inputs)
        self.news.release()
        self._answers.append(Future())
        try:
            return await asyncio.wrap_future(self._answers[-1])
        except asyncio.CancelledError:
            self.dropped += 1
            raise

    def answer(self) -> None:
        numbers = array("f", [float(one.token_ids[0]) for one in self.asked[-1]])
        content = memoryview(numbers.tobytes())
        self._answers[-1].set_result(PlainArray((len(numbers), 1), "float32", content))

    def fail(self, error: MachdError) -> None:
        self._answers[-1].set_exception(error)


class _Serving:
    def __init__(self, limits: GenerationLimits = _LIMITS) -> None:
        lifecycle = Lifecycle()
        lifecycle.become(State.READY)
        self.clock = ManualClock(100.0)
        self.records: list[RequestRecord] = []
        self.served = _Served()
        self.open = OpenGenerations(
            lifecycle=lifecycle, limits=limits, clock=self.clock, observers=[self]
        )
        self.encodings = Encodings(cast(ServedModel, self.served), self.open)

    def on_request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def encode(self, *texts: Sequence[int], name: str = "embd") -> asyncio.Task[Encoded]:
        inputs = [EncoderInput(tuple(one)) for one in texts]
        return asyncio.create_task(self.encodings.encode(lambda _: inputs, identity_of(name)))

    async def asked(self) -> None:
        """Wait until the engine is asked once more."""
        await self.served.news.acquire()


async def test_equal_texts_of_a_request_are_computed_once() -> None:
    """Each has its row, and all of them count as tokens."""
    serving = _Serving()
    task = serving.encode([5, 1], [6], [5, 1])
    await serving.asked()
    serving.served.answer()
    encoded = await task
    assert serving.served.asked == [(EncoderInput((5, 1)), EncoderInput((6,)))]
    assert list(encoded.places) == [0, 1, 0]
    assert encoded.prompt_tokens == 5
    (record,) = serving.records
    assert (record.finish_reason, record.inputs, record.prompt_tokens) == ("stop", 3, 5)
    assert len(serving.open) == 0


async def test_a_client_that_leaves_has_its_texts_dropped() -> None:
    """The engine forgets them, and the record says that the client left."""
    serving = _Serving()
    task = serving.encode([5])
    await serving.asked()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert serving.served.dropped == 1
    (record,) = serving.records
    assert (record.finish_reason, record.error_code) == ("abort", "client_disconnected")


async def test_a_request_ends_at_its_deadline() -> None:
    """The time counts from its arrival, and the engine forgets its texts."""
    serving = _Serving(replace(_LIMITS, request_timeout_s=0.05))
    with pytest.raises(RequestTimeoutError, match="request_timeout_s"):
        await serving.encode([5])
    await asyncio.sleep(0)
    assert serving.served.dropped == 1
    assert serving.records[0].error_code == "request_timeout"


async def test_the_engines_error_is_the_requests() -> None:
    """It is recorded as an error."""
    serving = _Serving()
    task = serving.encode([5])
    await serving.asked()
    serving.served.fail(EngineFaultError("the engine failed"))
    with pytest.raises(EngineFaultError):
        await task
    assert serving.records[0].finish_reason == "error"


async def test_a_drain_waits_and_then_ends_what_is_open() -> None:
    """A request that outlasts the drain gets its error at once."""
    serving = _Serving()
    task = serving.encode([5])
    await serving.asked()
    assert not await serving.open.drain(0.01)
    with pytest.raises(DrainDeadlineError):
        await task
    assert await serving.open.drain(0.01)


async def test_an_operator_ends_an_open_request() -> None:
    """It is among the open ones with its tokens, and its client gets the operator's error."""
    serving = _Serving()
    task = serving.encode([5, 6])
    await serving.asked()
    (open_one,) = serving.open.encodings
    assert (open_one.prompt_tokens, open_one.is_finished) == (2, False)
    open_one.fail(OperatorAbortError("an operator has ended this request"))
    with pytest.raises(OperatorAbortError):
        await task


async def test_texts_that_could_never_be_computed_are_refused() -> None:
    """The message names the limit."""
    serving = _Serving()
    with pytest.raises(InvalidRequestError, match=r"limits\.max_queue_tokens is 100"):
        await serving.encode([1] * 60, [2] * 41)
    assert serving.served.asked == []


async def test_texts_beyond_the_limit_of_all_requests_come_back_later() -> None:
    """Tokens of open requests count until they have ended."""
    serving = _Serving()
    first = serving.encode([1] * 60, name="first")
    await serving.asked()
    with pytest.raises(QueueFullError, match=r"limits\.max_queue_tokens"):
        await serving.encode([2] * 41, name="second")
    serving.served.answer()
    await first
    last = serving.encode([2] * 41, name="third")
    await serving.asked()
    serving.served.answer()
    assert (await last).prompt_tokens == 41


async def test_requests_and_tokens_count_for_the_keys_limits() -> None:
    """A key has so many requests open, and uses so many tokens a minute."""
    serving = _Serving(replace(_LIMITS, max_requests_per_key=1, max_tokens_per_minute_per_key=10))
    first = serving.encode([1] * 10, name="first")
    await serving.asked()
    with pytest.raises(KeyLimitError, match="max_requests_per_key"):
        await serving.encode([2], name="second")
    serving.served.answer()
    await first
    with pytest.raises(KeyLimitError, match="max_tokens_per_minute_per_key"):
        await serving.encode([2], name="third")
