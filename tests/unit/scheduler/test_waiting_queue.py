"""The bounded queue: what fits, who is next, who waited too long, when to come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sequence_samples import LIMITS, sequence_of

from machd.errors import QueueFullError
from machd.scheduler.waiting import WaitingQueue


def _queue_of(*sequence_ids: str, max_queue: int = 3, max_queue_tokens: int = 100) -> WaitingQueue:
    queue = WaitingQueue(replace(LIMITS, max_queue=max_queue, max_queue_tokens=max_queue_tokens))
    for sequence_id in sequence_ids:
        queue.append(sequence_of(sequence_id))
    return queue


def _ids(queue: WaitingQueue) -> list[str]:
    return [sequence.sequence_id for sequence in queue]


def test_first_come_first_served() -> None:
    """Sequences leave in the order they came, and each is told how many stand in front."""
    queue = WaitingQueue(LIMITS)
    positions = [queue.append(sequence_of(one)) for one in "abc"]

    assert positions == [0, 1, 2]
    assert [queue.pop_first().sequence_id for _ in "abc"] == ["a", "b", "c"]
    assert len(queue) == 0


def test_leaving_from_the_middle_keeps_the_order_of_the_rest() -> None:
    """Whoever leaves takes the own tokens along and nobody else's place."""
    queue = _queue_of("a", "b", "c")

    assert queue.remove("b").sequence_id == "b"
    assert _ids(queue) == ["a", "c"]
    assert "b" not in queue
    assert "c" in queue
    assert queue.prompt_tokens == 8


def test_an_id_queues_once() -> None:
    """Two sequences of one id would make aborts ambiguous: a mistake of the caller."""
    queue = _queue_of("a")
    with pytest.raises(AssertionError, match="unique"):
        queue.append(sequence_of("a"))


@pytest.mark.parametrize(
    ("waiting", "new", "free_slots", "fits"),
    [
        (0, 3, 0, True),
        (0, 4, 0, False),
        (3, 1, 0, False),
        (2, 1, 0, True),
        (0, 4, 1, True),
        (0, 5, 1, False),
        (0, 5, 2, True),
    ],
)
def test_the_number_of_waiting_sequences_is_bounded(
    waiting: int, new: int, free_slots: int, *, fits: bool
) -> None:
    """``max_queue`` sequences may wait, and those that find a free slot do not wait."""
    queue = _queue_of(*(f"w{index}" for index in range(waiting)))
    sequences = tuple(sequence_of(f"n{index}") for index in range(new))

    if fits:
        queue.check_room(sequences, free_slots=free_slots)
    else:
        with pytest.raises(QueueFullError) as refusal:
            queue.check_room(sequences, free_slots=free_slots)
        assert "limits.max_queue is 3" in refusal.value.message
        assert refusal.value.retry_after_s >= 1
    assert len(queue) == waiting


@pytest.mark.parametrize(
    ("waiting", "new", "free_slots", "fits"),
    [
        ([60], [40], 0, True),
        ([60], [41], 0, False),
        ([], [101], 0, False),
        ([], [101], 1, True),  # it need not wait, so it is not part of the queue
        ([], [60, 60], 1, False),
        ([], [60, 60], 2, True),
    ],
)
def test_the_prompt_tokens_of_waiting_sequences_are_bounded(
    waiting: list[int], new: list[int], free_slots: int, *, fits: bool
) -> None:
    """``max_queue_tokens`` prompt tokens may wait; a request that runs at once is free of it."""
    queue = _queue_of()
    for index, tokens in enumerate(waiting):
        queue.append(sequence_of(f"w{index}", prompt_tokens=tokens))
    sequences = tuple(
        sequence_of(f"n{index}", prompt_tokens=tokens) for index, tokens in enumerate(new)
    )

    if fits:
        queue.check_room(sequences, free_slots=free_slots)
    else:
        with pytest.raises(QueueFullError, match=r"limits\.max_queue_tokens is 100"):
            queue.check_room(sequences, free_slots=free_slots)
    assert queue.prompt_tokens == sum(waiting)


def test_waiting_expires_at_the_timeout() -> None:
    """Whoever has waited ``queue_timeout_s`` or longer is named, and stays until removed."""
    queue = WaitingQueue(LIMITS)
    for sequence_id, arrived_s in [("old", 0.0), ("older", -5.0), ("young", 0.1)]:
        queue.append(sequence_of(sequence_id, arrived_s=arrived_s))

    assert [one.sequence_id for one in queue.expired(9.9)] == ["older"]
    assert [one.sequence_id for one in queue.expired(10.0)] == ["old", "older"]
    assert len(queue) == 3


def test_retry_after_is_learnt_from_service_times() -> None:
    """Before anything ran it is a second; then it is what sequences take, rounded up."""
    queue = WaitingQueue(LIMITS)
    assert queue.retry_after_s() == 1

    queue.record_service_time(7.2)
    assert queue.retry_after_s() == 8

    for _ in range(100):
        queue.record_service_time(30.0)
    assert queue.retry_after_s() == 30


def test_one_unusual_sequence_does_not_decide_retry_after() -> None:
    """The newest time counts for a part only, so one giant does not send everybody away."""
    queue = WaitingQueue(LIMITS)
    for seconds_s in [10.0, 10.0, 60.0]:
        queue.record_service_time(seconds_s)
    assert 10 < queue.retry_after_s() <= 20


@given(times_s=st.lists(st.floats(0, 1e7), max_size=30))
def test_retry_after_is_bounded(times_s: list[float]) -> None:
    """Whatever was measured, a client is told between one second and ten minutes."""
    queue = WaitingQueue(LIMITS)
    for seconds_s in times_s:
        queue.record_service_time(seconds_s)
    assert 1 <= queue.retry_after_s() <= 600


@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 50)),
            st.tuples(st.just("pop_first"), st.just(0)),
            st.tuples(st.just("remove"), st.integers(0, 9)),
        )
    )
)
def test_queue_is_an_ordered_bag_with_a_token_count(moves: list[tuple[str, int]]) -> None:
    """After any sequence of moves the queue equals a plain list, order and tokens included."""
    queue = WaitingQueue(LIMITS)
    model: list[tuple[str, int]] = []
    for number, (move, value) in enumerate(moves):
        if move == "append":
            model.append((f"s{number}", value))
            assert queue.append(sequence_of(f"s{number}", prompt_tokens=value)) == len(model) - 1
        elif model:
            index = 0 if move == "pop_first" else value % len(model)
            expected = model.pop(index)[0]
            gone = queue.pop_first() if move == "pop_first" else queue.remove(expected)
            assert gone.sequence_id == expected
        assert _ids(queue) == [sequence_id for sequence_id, _ in model]
        assert queue.prompt_tokens == sum(tokens for _, tokens in model)
