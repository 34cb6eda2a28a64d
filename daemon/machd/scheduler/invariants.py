"""Invariants that hold between any two calls of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping

from machd.scheduler.sequence import Sequence
from machd.scheduler.slots import Slots
from machd.scheduler.subscriber import Subscriber, SubscriberState
from machd.scheduler.waiting import WaitingQueue


def check_sequences(slots: Slots, waiting: WaitingQueue, is_open: Mapping[str, Sequence]) -> None:
    """Assert that slots, queue and sequences agree."""
    for sequence in slots:
        assert slots.at(-1 if sequence.slot_index is None else sequence.slot_index) is sequence, (
            "a sequence does not know its slot"
        )
        _check_subscribers(sequence.subscribers, SubscriberState.RUNNING)
    for sequence in waiting:
        assert not sequence.is_running, "a running sequence waits"
        _check_subscribers(sequence.subscribers, SubscriberState.WAITING)
    expected = {
        one.sequence_id: sequence for sequence in (*slots, *waiting) for one in sequence.subscribers
    }
    assert is_open == expected, "the open sequences are not those that slots and queue serve"
    prompt_tokens = sum(sequence.prompt_tokens for sequence in waiting)
    assert prompt_tokens == waiting.prompt_tokens, "queued tokens do not add up"


def _check_subscribers(subscribers: list[Subscriber], state: SubscriberState) -> None:
    assert subscribers, f"a {state} sequence has no subscriber"
    assert {one.state for one in subscribers} == {state}, (
        f"a subscriber of a {state} sequence is not {state}"
    )
