"""The way into the engine thread: order, waiting, emptying."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from support.clocks.polling import CEILING_S, wait_until
from support.schedulers.sequence_samples import request_of

from machd.engine_process.inbox import Abort, ChangeConfig, Inbox, Message, Stop, Submit
from machd.errors import DrainDeadlineError
from machd.settings.model import Settings

_LONG_S = 3600.0
"""Longer than any test waits: a wait that ends has been ended."""


class _ObservedQueue(SimpleQueue[Message]):
    """Notes how long each of its readers is ready to wait."""

    def __init__(self) -> None:
        self.waits_s: list[float | None] = []

    def get(self, block: bool = True, timeout: float | None = None) -> Message:  # noqa: FBT001, FBT002 - the queue's own
        if timeout is not None:
            self.waits_s.append(timeout)
        return super().get(block, timeout)


def _observed_inbox() -> tuple[Inbox, _ObservedQueue]:
    inbox, queue = Inbox(), _ObservedQueue()
    inbox._queue = queue
    return inbox, queue


def _abort(number: int) -> Abort:
    return Abort((str(number),), None)


def test_messages_come_out_in_order_and_all_at_once() -> None:
    """One drain takes everything that lies there, whatever its kind, and leaves nothing."""
    inbox = Inbox()
    messages: list[Message] = [
        Submit((request_of("a"),)),
        _abort(1),
        Submit((request_of("b"),)),
        Stop(DrainDeadlineError("over")),
    ]
    for message in messages:
        inbox.put(message)

    assert inbox.drain(wait_s=0) == messages
    assert inbox.drain(wait_s=0) == []


def test_an_empty_inbox_does_not_hold_a_busy_thread() -> None:
    """Without a wait the answer is an empty list at once; the engine has steps to run."""
    assert Inbox().drain(wait_s=0) == []


def test_drain_gives_up_after_the_wait() -> None:
    """An idle thread comes back after the given seconds, to beat its heart, although nothing came."""
    inbox, queue = _observed_inbox()

    assert inbox.drain(wait_s=0.05) == []
    assert queue.waits_s == [0.05]


def test_a_message_ends_the_wait() -> None:
    """An idle thread wakes for the message, not at the end of its wait."""
    inbox, queue = _observed_inbox()
    drained: list[Message] = []
    waiter = threading.Thread(target=lambda: drained.extend(inbox.drain(wait_s=_LONG_S)))
    waiter.start()
    wait_until(lambda: queue.waits_s == [_LONG_S], "the thread waits")
    inbox.put(_abort(1))
    waiter.join(CEILING_S)

    assert not waiter.is_alive()
    assert drained == [_abort(1)]


def test_messages_of_many_threads_all_arrive() -> None:
    """Nothing is lost or doubled, and each sender's messages keep their order."""
    inbox = Inbox()

    def send(sender: int) -> None:
        for number in range(200):
            inbox.put(_abort(sender * 1000 + number))

    senders = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in senders:
        thread.start()
    received: list[int] = []
    while len(received) < 800:
        messages = inbox.drain(wait_s=_LONG_S)
        assert messages, "a message was lost"
        received += [
            int(message.sequence_ids[0]) for message in messages if isinstance(message, Abort)
        ]
    for thread in senders:
        thread.join()

    for sender in range(4):
        own = [number for number in received if number // 1000 == sender]
        assert own == [sender * 1000 + number for number in range(200)]


def test_the_first_answer_to_a_change_counts() -> None:
    """Two threads may answer it: the second one is not heard and does not fail."""
    error = DrainDeadlineError("over")
    for answers in ([None, error], [error, None]):
        change = ChangeConfig(Settings(), is_measured=False)
        for one in answers:
            change.answer(one)
        assert change.done.exception(0) is answers[0]
