"""One sequence and its subscribers: what it holds, and what each of them is owed."""

from __future__ import annotations

import pytest
from support.schedulers.sequence_samples import running_decode_of, sequence_of, subscriber_of

from machd.engine.protocol.step import DecodeRow, Lane, SampledToken
from machd.scheduler.sequence import PRIORITY_DELAY_S
from machd.scheduler.subscriber import Priority, SubscriberState


def test_a_decode_is_admitted_once() -> None:
    """A slot is taken once, and with it every subscriber begins to be answered."""
    sequence = sequence_of()
    sequence.join(subscriber_of("b"))
    sequence.admit(2, Lane.BATCH, now_s=1.0)

    assert (sequence.slot_index, sequence.lane, sequence.admitted_s) == (2, Lane.BATCH, 1.0)
    assert {subscriber.state for subscriber in sequence.subscribers} == {SubscriberState.RUNNING}
    with pytest.raises(AssertionError, match="admitted twice"):
        sequence.admit(1, Lane.BATCH, now_s=1.0)


def test_prefill_needs_a_slot_and_an_unfinished_prompt() -> None:
    """No chunk exists before admission or after the prompt's end, no row before it."""
    with pytest.raises(AssertionError, match="needs a slot"):
        sequence_of().next_chunk(8)
    sequence = running_decode_of(prompt_tokens=2)
    with pytest.raises(AssertionError, match="the prompt comes first"):
        sequence.next_row()
    sequence.prefilled_tokens = 2
    with pytest.raises(AssertionError, match="already prefilled"):
        sequence.next_chunk(8)
    assert sequence.next_row() == DecodeRow(0)


def test_reservation_is_prompt_and_completion_together() -> None:
    """A sequence reserves every position that it may take."""
    assert sequence_of(prompt_tokens=7, max_tokens=5).reserved_tokens == 12


def test_late_subscriber_counts_the_tokens_so_far() -> None:
    """The tokens so far count as the newcomer's own, and the next one counts for both."""
    sequence = running_decode_of()
    sequence.prefilled_tokens = 4
    sequence.count_token(SampledToken(0, 7))
    late = subscriber_of("late")
    sequence.join(late)
    sequence.count_token(SampledToken(0, 8))

    assert [token.token_id for token in sequence.tokens] == [7, 8]
    assert [subscriber.completion_tokens for subscriber in sequence.subscribers] == [2, 2]


def test_place_is_that_of_the_most_urgent_subscriber() -> None:
    """An interactive subscriber moves its sequence forward; none moves it back."""
    sequence = sequence_of("a", number=3, arrived_s=10.0, priority=Priority.BATCH)
    places = [sequence.place]
    for name, priority in [("b", Priority.INTERACTIVE), ("c", Priority.NORMAL)]:
        sequence.join(sequence_of(name, arrived_s=20.0, priority=priority).subscribers[0])
        places.append(sequence.place)
    assert places == [(70.0, 3), (20.0, 3), (20.0, 3)]


def test_priorities_are_ordered_by_what_they_cost() -> None:
    """The better the priority, the smaller the delay, and the best has none."""
    delays_s = [PRIORITY_DELAY_S[one] for one in Priority]
    assert delays_s == sorted(delays_s)
    assert delays_s[0] == 0.0
