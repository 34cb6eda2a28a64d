"""The bounded queue: room, order, timeouts and retry times."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.schedulers.sequence_samples import LIMITS, sequence_of, subscriber_of

from machd.errors import QueueFullError
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import Priority
from machd.scheduler.waiting import WaitingQueue


def _queue_of(*sequence_ids: str, max_queue: int = 3, max_queue_tokens: int = 100) -> WaitingQueue:
    queue = WaitingQueue(replace(LIMITS, max_queue=max_queue, max_queue_tokens=max_queue_tokens))
    for number, sequence_id in enumerate(sequence_ids):
        queue.add(sequence_of(sequence_id, number=number))
    return queue


def _ids(queue: WaitingQueue) -> list[str]:
    return [sequence.request.sequence_id for sequence in queue]


def test_first_come_first_served() -> None:
    """The earliest is first, and positions count the sequences in front."""
    queue = WaitingQueue(LIMITS)
    positions = []
    for name in "abc":
        sequence = sequence_of(name)
        queue.add(sequence)
        positions.append(queue.position(sequence))

    assert positions == [0, 1, 2]
    assert _ids(queue) == ["a", "b", "c"]
    assert next(iter(queue)).request.sequence_id == "a"


def test_leaving_from_the_middle_keeps_the_order_of_the_rest() -> None:
    """A removed sequence gives back its own tokens and keeps the others' order."""
    queue = _queue_of("a", "b", "c")
    _, gone, last = tuple(queue)
    queue.remove(gone)

    assert _ids(queue) == ["a", "c"]
    assert gone not in queue
    assert last in queue
    assert queue.prompt_tokens == 8


def test_a_decode_queues_once() -> None:
    """The same work twice in the queue would be done twice: a mistake of the caller."""
    queue = _queue_of("a")
    with pytest.raises(AssertionError, match="once"):
        queue.add(next(iter(queue)))


def test_a_better_priority_goes_first_but_not_for_ever() -> None:
    """A request is overtaken only by requests that arrive within its delay."""
    queue = WaitingQueue(LIMITS)
    for number, (name, arrived_s, priority) in enumerate(
        [
            ("batch", 0.0, Priority.BATCH),
            ("normal", 30.0, Priority.NORMAL),
            ("interactive", 40.0, Priority.INTERACTIVE),
            ("late normal", 45.1, Priority.NORMAL),
            ("late interactive", 60.1, Priority.INTERACTIVE),
        ]
    ):
        queue.add(sequence_of(name, number=number, arrived_s=arrived_s, priority=priority))
    assert _ids(queue) == ["interactive", "normal", "batch", "late normal", "late interactive"]


@given(arrivals_s=st.lists(st.floats(0, 1000), max_size=50))
def test_queue_starves_no_sequence(arrivals_s: list[float]) -> None:
    """However many interactive requests come, only those of the first minute overtake a batch one."""
    queue = WaitingQueue(LIMITS)
    starving = sequence_of("batch", number=0, arrived_s=0.0, priority=Priority.BATCH)
    queue.add(starving)
    for number, arrived_s in enumerate(arrivals_s, start=1):
        queue.add(
            sequence_of("i", number=number, arrived_s=arrived_s, priority=Priority.INTERACTIVE)
        )
    assert queue.position(starving) == sum(arrived_s < 60.0 for arrived_s in arrivals_s)


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
        queue.add(sequence_of(f"w{index}", number=index, prompt_tokens=tokens))
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
    """A sequence that has waited ``queue_timeout_s`` is expired, and stays until removed."""
    queue = WaitingQueue(LIMITS)
    assert queue.next_expiry_s() == math.inf
    for sequence_id, arrived_s in [("old", 0.0), ("older", -5.0), ("young", 0.1)]:
        queue.add(sequence_of(sequence_id, number=len(queue), arrived_s=arrived_s))

    assert queue.next_expiry_s() == 5.0
    assert [one.sequence_id for one in queue.expired(9.9)] == ["older"]
    assert [one.sequence_id for one in queue.expired(10.0)] == ["older", "old"]
    assert len(queue) == 3


def test_each_subscriber_has_its_own_timeout() -> None:
    """Two subscribers of a sequence take one place, count as two and time out on their own."""
    queue = _queue_of("a")
    next(iter(queue)).join(subscriber_of("b", arrived_s=4.0))

    assert [one.sequence_id for one in queue.expired(10.0)] == ["a"]
    assert [one.sequence_id for one in queue.expired(14.0)] == ["a", "b"]
    assert (len(queue), queue.subscriber_count) == (1, 2)


@given(seconds_s=st.floats(0, 1e7))
def test_retry_after_is_whole_seconds_within_bounds(seconds_s: float) -> None:
    """It is the forecast of the next departure, rounded up: between one second and ten minutes."""
    queue = WaitingQueue(LIMITS, lambda count: seconds_s * count)
    assert queue.retry_after_s() == min(600, max(1, math.ceil(seconds_s)))


@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 50)),
            st.tuples(st.just("remove"), st.integers(0, 9)),
        )
    )
)
def test_queue_is_an_ordered_bag_with_a_token_count(moves: list[tuple[str, int]]) -> None:
    """After any sequence of moves the queue equals a plain list, order and tokens included."""
    queue = WaitingQueue(LIMITS)
    model: list[Sequence] = []
    for number, (move, value) in enumerate(moves):
        if move == "add":
            model.append(sequence_of(f"s{number}", number=number, prompt_tokens=value))
            queue.add(model[-1])
            assert queue.position(model[-1]) == len(model) - 1
        elif model:
            queue.remove(model.pop(value % len(model)))
        assert list(queue) == model
        assert queue.prompt_tokens == sum(sequence.prompt_tokens for sequence in model)
