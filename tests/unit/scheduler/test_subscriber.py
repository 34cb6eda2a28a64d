"""One sequence's life: waiting, running, finished, and never back."""

from __future__ import annotations

import pytest
from support.schedulers.sequence_samples import request_of, subscriber_of

from machd.errors import RequestTimeoutError
from machd.scheduler.events import FinishReason, SequenceFinished
from machd.scheduler.subscriber import Subscriber, SubscriberState


def test_a_sequence_is_waiting_running_finished() -> None:
    """The three states come in this order."""
    subscriber = subscriber_of()
    states = [subscriber.state]
    subscriber.start()
    states.append(subscriber.state)
    subscriber.finish(FinishReason.STOP, now_s=2.0)
    states.append(subscriber.state)
    assert states == [SubscriberState.WAITING, SubscriberState.RUNNING, SubscriberState.FINISHED]


def test_the_end_tells_what_was_done() -> None:
    """The event carries the reason, the error, both token counts and the time."""
    subscriber = subscriber_of("s", prompt_tokens=7)
    subscriber.start()
    subscriber.count_token()
    subscriber.count_token()
    error = RequestTimeoutError("too long")

    assert subscriber.finish(FinishReason.ERROR, 5.0, error) == SequenceFinished(
        sequence_id="s",
        reason=FinishReason.ERROR,
        error=error,
        prompt_tokens=7,
        cached_tokens=0,
        completion_tokens=2,
        at_s=5.0,
    )


def test_a_sequence_starts_once() -> None:
    """Neither a running nor a finished sequence starts."""
    subscriber = subscriber_of()
    subscriber.start()
    with pytest.raises(AssertionError, match="started while running"):
        subscriber.start()

    subscriber.finish(FinishReason.STOP, now_s=2.0)
    with pytest.raises(AssertionError, match="started while finished"):
        subscriber.start()


def test_a_sequence_finishes_once() -> None:
    """A second end would be a second answer to one client."""
    subscriber = subscriber_of()
    subscriber.finish(FinishReason.ABORT, now_s=1.0)
    with pytest.raises(AssertionError, match="finished twice"):
        subscriber.finish(FinishReason.ABORT, now_s=1.0)


def test_only_a_running_sequence_gets_tokens() -> None:
    """No token before the slot, none after the end."""
    subscriber = subscriber_of()
    with pytest.raises(AssertionError, match="token while waiting"):
        subscriber.count_token()
    subscriber.start()
    subscriber.finish(FinishReason.STOP, now_s=1.0)
    with pytest.raises(AssertionError, match="token while finished"):
        subscriber.count_token()


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(0, 1), (0, 0), (1, -1)])
def test_an_empty_sequence_is_refused(prompt_tokens: int, max_tokens: int) -> None:
    """A sequence has a prompt and no negative number of tokens, or it would never end."""
    with pytest.raises(AssertionError, match="token"):
        Subscriber(request_of(prompt_tokens=prompt_tokens, max_tokens=max_tokens))
