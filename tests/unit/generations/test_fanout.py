"""A step reaches many streams with one wake-up; memory is bounded, and errors come after events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from unittest.mock import patch

import pytest
from support.daemon.serving_parts import admitted, finished, token

from machd.errors import ClientStalledError, EngineFaultError
from machd.generations import fanout as fanout_module
from machd.generations.fanout import MAX_PENDING_EVENTS, MAX_TAKEN_EVENTS, Fanout, Stream
from machd.scheduler.events import (
    Event,
    FinishReason,
    OutputGenerated,
    SequenceFinished,
    SequenceQueued,
    StepCompleted,
)

_QUIET_S = 0.05


class _Observer:
    def __init__(self) -> None:
        self.seen: list[list[Event]] = []

    def on_events(self, events: Sequence[Event]) -> None:
        self.seen.append(list(events))


class _CountingLoop:
    """Only what fan-out uses of an event loop, counted, and run when a test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def call_soon_threadsafe(self, call: Callable[..., object], *args: object) -> None:
        self.calls.append(lambda: call(*args))


async def _is_silent(stream: Stream) -> bool:
    try:
        async with asyncio.timeout(_QUIET_S):
            await stream.take()
    except TimeoutError:
        return True
    return False


def test_one_step_wakes_the_event_loop_once() -> None:
    """Whatever the number of events and streams, a publish is one thread-safe call."""
    loop = _CountingLoop()
    fanout = Fanout(loop)  # type: ignore[arg-type]  # a stand-in with the one method that is used
    for number in range(16):
        fanout.open([str(number)])

    fanout.publish([token(str(number), 97) for number in range(16)])

    assert len(loop.calls) == 1


async def test_events_reach_their_readers_in_order() -> None:
    """Published on another thread, each sequence's events come to its stream as they were said."""
    fanout = Fanout(asyncio.get_running_loop())
    first, second = fanout.open(["a", "b"]), fanout.open(["c"])
    events: list[Event] = [
        admitted("a"),
        token("a", 1),
        token("c", 2),
        token("b", 3),
        finished("a"),
    ]

    engine_thread = threading.Thread(target=fanout.publish, args=(events,))
    engine_thread.start()

    assert await first.take() == [events[0], events[1], events[3], events[4]]
    assert await second.take() == [events[2]]
    engine_thread.join()


async def test_a_slow_reader_gets_everything_at_once() -> None:
    """``take`` returns all events since the last one, and leaves none."""
    fanout = Fanout(asyncio.get_running_loop())
    stream = fanout.open(["a"])
    for number in range(5):
        fanout.publish([token("a", number)])
    await asyncio.sleep(0)

    assert await stream.take() == [token("a", number) for number in range(5)]
    assert await _is_silent(stream)


async def test_what_nobody_reads_is_dropped() -> None:
    """Unknown and closed sequences cost nothing, and the facts of a step are for observers only."""
    observer = _Observer()
    fanout = Fanout(asyncio.get_running_loop(), [observer])
    stream, closed = fanout.open(["a"]), fanout.open(["b", "c"])
    fanout.close(["b", "never opened"])
    assert len(fanout) == 2
    fanout.close(["c"])
    events: list[Event] = [
        token("b", 1),
        token("x", 2),
        SequenceQueued("a", 0),
        StepCompleted(1, 0, 0.1),
    ]

    fanout.publish(events)

    assert await _is_silent(stream)
    assert await _is_silent(closed)
    assert observer.seen == [events]
    assert len(fanout) == 1


async def test_every_observer_sees_every_event_once() -> None:
    """Observers are told of all events in order, those of unread sequences included.

    Steps that come before the event loop has woken up share one wake-up.
    """
    observers = [_Observer(), _Observer()]
    fanout = Fanout(asyncio.get_running_loop(), observers)
    steps: list[list[Event]] = [[token("a", 1)], [finished("a"), StepCompleted(1, 0, 0.1)]]
    for step in steps:
        fanout.publish(step)
    await asyncio.sleep(0)
    fanout.publish(steps[0])
    await asyncio.sleep(0)

    seen = [[*steps[0], *steps[1]], steps[0]]
    assert [observer.seen for observer in observers] == [seen, seen]


async def test_a_sequence_has_one_reader() -> None:
    """Opening an id twice is a mistake of the caller."""
    fanout = Fanout(asyncio.get_running_loop())
    fanout.open(["a"])
    with pytest.raises(AssertionError, match="unique"):
        fanout.open(["a"])


async def test_an_error_comes_after_what_was_pending() -> None:
    """A failed stream gives its news first, then the error, again and again."""
    stream = Stream()
    stream.push(token("a", 1))
    stream.fail(EngineFaultError("first"))
    stream.fail(EngineFaultError("second"))

    assert await stream.take() == [token("a", 1)]
    for _ in range(2):
        with pytest.raises(EngineFaultError, match="first"):
            await stream.take()


async def test_an_error_wakes_a_waiting_stream() -> None:
    """A ``take`` that waits on a failed stream wakes."""
    stream = Stream()
    waiting = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.fail(EngineFaultError("over"))
    with pytest.raises(EngineFaultError):
        await asyncio.wait_for(waiting, 10)


async def test_unread_events_are_bounded() -> None:
    """A client that reads nothing is stalled: it keeps what fits, and memory stops growing."""
    stream = Stream()
    for number in range(MAX_PENDING_EVENTS + 100):
        stream.push(token("a", number))

    taken: list[object] = []
    while len(taken) < MAX_PENDING_EVENTS:
        piece = await stream.take()
        assert 0 < len(piece) <= MAX_TAKEN_EVENTS
        taken += piece
    assert taken == [token("a", number) for number in range(MAX_PENDING_EVENTS)]
    with pytest.raises(ClientStalledError) as stalled:
        await stream.take()
    assert str(MAX_PENDING_EVENTS) in stalled.value.message


async def test_a_stalled_stream_never_goes_on_after_its_gap() -> None:
    """Once events were dropped, no later one is delivered: a text with a hole would look whole."""
    with patch.object(fanout_module, "MAX_PENDING_EVENTS", 3):
        stream = Stream()
        for number in range(5):
            stream.push(token("a", number))
        assert await stream.take() == [token("a", number) for number in range(3)]
        stream.push(token("a", 5))
        stream.push(finished("a"))

        with pytest.raises(ClientStalledError):
            await stream.take()


async def test_what_was_made_is_counted_whether_it_is_read_or_not() -> None:
    """Tokens that are unread, that were dropped, that came after a failure, and the final stop."""
    with patch.object(fanout_module, "MAX_PENDING_EVENTS", 3):
        stream = Stream()
        assert (stream.is_admitted, stream.completion_tokens) == (False, 0)
        stream.push(admitted("a"))
        for number in range(5):
            stream.push(token("a", number))
            stream.push(token("b", number))
        assert (stream.is_admitted, stream.completion_tokens) == (True, 10)
        await stream.take()
        stream.push(finished("a", completion_tokens=6))
        stream.push(finished("b", FinishReason.ERROR, EngineFaultError("over")))
        assert stream.completion_tokens == 11


async def test_a_cancelled_reader_loses_nothing() -> None:
    """An event that comes after a cancelled ``take`` is returned by the next one."""
    stream = Stream()
    assert await _is_silent(stream)
    stream.push(token("a", 1))
    assert await stream.take() == [token("a", 1)]


async def test_the_end_is_delivered_like_any_event() -> None:
    """A finished sequence's last events come even when its stream is closed right after."""
    fanout = Fanout(asyncio.get_running_loop())
    stream = fanout.open(["a"])
    fanout.publish([token("a", 1), finished("a", FinishReason.LENGTH)])
    await asyncio.sleep(0)
    fanout.close(["a"])

    last = await stream.take()
    assert [type(event) for event in last] == [OutputGenerated, SequenceFinished]
