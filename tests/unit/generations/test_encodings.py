"""Texts of a request on their way through an encoder: equal ones once, limits, deadlines, ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.engines.serving_encoder import LIMITS, ServingEncoder

from machd.engine.protocol.encoder import EncoderInput
from machd.errors import (
    DrainDeadlineError,
    EngineFaultError,
    InvalidRequestError,
    KeyLimitError,
    OperatorAbortError,
    QueueFullError,
    RequestTimeoutError,
)


async def test_equal_texts_of_a_request_are_computed_once() -> None:
    """Each has its row, and all of them count as tokens."""
    serving = ServingEncoder()
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
    serving = ServingEncoder()
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
    serving = ServingEncoder(replace(LIMITS, request_timeout_s=0.05))
    with pytest.raises(RequestTimeoutError, match="request_timeout_s"):
        await serving.encode([5])
    await asyncio.sleep(0)
    assert serving.served.dropped == 1
    assert serving.records[0].error_code == "request_timeout"


async def test_the_engines_error_is_the_requests() -> None:
    """It is recorded as an error."""
    serving = ServingEncoder()
    task = serving.encode([5])
    await serving.asked()
    serving.served.fail(EngineFaultError("the engine failed"))
    with pytest.raises(EngineFaultError):
        await task
    assert serving.records[0].finish_reason == "error"


async def test_a_drain_waits_and_then_ends_what_is_open() -> None:
    """A request that outlasts the drain gets its error at once."""
    serving = ServingEncoder()
    task = serving.encode([5])
    await serving.asked()
    assert not await serving.open.drain(0.01)
    with pytest.raises(DrainDeadlineError):
        await task
    assert await serving.open.drain(0.01)


async def test_an_operator_ends_an_open_request() -> None:
    """It is among the open ones with its tokens, and its client gets the operator's error."""
    serving = ServingEncoder()
    task = serving.encode([5, 6])
    await serving.asked()
    (open_one,) = serving.open.encodings
    assert (open_one.prompt_tokens, open_one.is_finished) == (2, False)
    open_one.fail(OperatorAbortError("an operator has ended this request"))
    with pytest.raises(OperatorAbortError):
        await task


async def test_texts_that_could_never_be_computed_are_refused() -> None:
    """The message names the limit."""
    serving = ServingEncoder()
    with pytest.raises(InvalidRequestError, match=r"limits\.max_queue_tokens is 100"):
        await serving.encode([1] * 60, [2] * 41)
    assert serving.served.asked == []


async def test_texts_beyond_the_limit_of_all_requests_come_back_later() -> None:
    """Tokens of open requests count until they have ended."""
    serving = ServingEncoder()
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
    serving = ServingEncoder(
        replace(LIMITS, max_requests_per_key=1, max_tokens_per_minute_per_key=10)
    )
    first = serving.encode([1] * 10, name="first")
    await serving.asked()
    with pytest.raises(KeyLimitError, match="max_requests_per_key"):
        await serving.encode([2], name="second")
    serving.served.answer()
    await first
    with pytest.raises(KeyLimitError, match="max_tokens_per_minute_per_key"):
        await serving.encode([2], name="third")
