"""Continuous batching: slots, lanes, admission and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from support.engines.fake_engine import FakeEngine, FakeFaults, lettered
from support.schedulers.sequence_samples import (
    LIMITS,
    LateFirstToken,
    batching_of,
    only,
    outputs_of,
    request_of,
    run_step,
)

from machd.engine.protocol.step import Lane, SampledToken, StepPlan
from machd.errors import (
    EngineFaultError,
    KvBudgetExceededError,
    KvBudgetSpentError,
    QueueFullError,
    QueueTimeoutError,
    RowFaultError,
)
from machd.scheduler.admission import KvPolicy
from machd.scheduler.config import continuous
from machd.scheduler.events import (
    DecodeMode,
    Event,
    FinishReason,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
)
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import Priority, SequenceRequest


def _submit(scheduler: Scheduler, *requests: SequenceRequest, now_s: float = 0.0) -> list[Event]:
    """Each a request of its own."""
    return [event for one in requests for event in scheduler.submit((one,), now_s)]


def _admitted(events: list[Event]) -> list[str]:
    return [one.sequence_id for one in only(SequenceAdmitted, events)]


def _run_to_end(scheduler: Scheduler, engine: FakeEngine) -> list[Event]:
    events: list[Event] = []
    for _ in range(1000):
        events += run_step(scheduler, engine, now_s=0.0)
        scheduler.check_invariants()
        if scheduler.running_count + scheduler.waiting_count == 0 and scheduler.plan().is_empty:
            return events
    raise AssertionError("the scheduler does not come to an end")


def _text(events: list[Event], sequence_id: str) -> list[int]:
    return [one.token_id for one in outputs_of(SampledToken, events, sequence_id)]


# Slots


def test_idle_scheduler_has_nothing_to_do() -> None:
    """Nothing runs, nothing waits, nothing is promised and nothing is planned."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(max_b=4)))
    assert (scheduler.mode, scheduler.slot_count) == (DecodeMode.BATCHED, 4)
    assert (scheduler.running_count, scheduler.waiting_count, scheduler.active_loops) == (0, 0, 0)
    assert (scheduler.kv_budget_bytes, scheduler.kv_reserved_bytes) == (1_000_000, 0)
    assert scheduler.admit(now_s=0.0) == []
    assert scheduler.plan().is_empty
    assert scheduler.wait_s(0.0) is None
    scheduler.check_invariants()


def test_sequences_share_steps_up_to_the_number_of_slots() -> None:
    """``max_b`` sequences decode in one step, the next one waits, and joins when a slot is free."""
    scheduler, engine = Scheduler(continuous(LIMITS, batching_of(max_b=2))), FakeEngine()
    _submit(
        scheduler, request_of("a", max_tokens=3), *(request_of(one, max_tokens=9) for one in "bc")
    )

    events = run_step(scheduler, engine, now_s=0.0)
    assert _admitted(events) == ["a", "b"]
    assert {one.decode_mode for one in only(SequenceAdmitted, events)} == {DecodeMode.BATCHED}
    assert len(scheduler.plan().decode) == scheduler.active_loops == 2
    assert scheduler.waiting_count == 1

    for _ in range(2):
        assert not _admitted(run_step(scheduler, engine, now_s=0.0))
    assert _admitted(run_step(scheduler, engine, now_s=0.0)) == ["c"]
    assert scheduler.active_loops == 2


@pytest.mark.parametrize("make_engine", [FakeEngine, LateFirstToken])
def test_each_sequence_gets_its_own_tokens(make_engine: Callable[[], FakeEngine]) -> None:
    """Other rows of the step and the time of the first token do not matter."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(max_b=3)))
    requests = [
        request_of(name, prompt_tokens=1 + index, max_tokens=2 + index)
        for index, name in enumerate("abcdef")
    ]
    _submit(scheduler, *requests)
    events = _run_to_end(scheduler, make_engine())

    for request in requests:
        expected = [
            lettered(request.prompt, request.sampling, position)
            for position in range(request.max_tokens)
        ]
        assert _text(events, request.sequence_id) == expected
    assert {one.reason for one in only(SequenceFinished, events)} == {FinishReason.LENGTH}


def test_queue_is_served_by_priority_without_starvation() -> None:
    """A better priority goes first, but a batch request only waits out its minute."""
    limits = replace(LIMITS, queue_timeout_s=1000.0, request_timeout_s=1000.0)
    scheduler, engine = Scheduler(continuous(limits, batching_of(max_b=1))), FakeEngine()
    _submit(scheduler, request_of("batch", max_tokens=1, priority=Priority.BATCH))
    order: list[str] = []
    for second in range(0, 100, 5):
        request = request_of(
            f"i{second}", max_tokens=1, arrived_s=second, priority=Priority.INTERACTIVE
        )
        _submit(scheduler, request, now_s=second)
        order += _admitted(run_step(scheduler, engine, now_s=second))
    assert order.index("batch") == 12, "those of the seconds 0 to 55 went first, no other"


def test_the_queue_is_bounded_behind_the_slots() -> None:
    """Free slots are no queue: ``max_b`` and ``max_queue`` together are taken in, not one more."""
    scheduler = Scheduler(continuous(replace(LIMITS, max_queue=1), batching_of(max_b=2)))
    events = _submit(scheduler, *(request_of(one) for one in "abcd"))
    assert [type(one) for one in events] == [SequenceQueued] * 3 + [SequenceFinished]
    (refused,) = only(SequenceFinished, events)
    assert isinstance(refused.error, QueueFullError)


def test_an_abort_ends_one_row_and_frees_its_slot_first() -> None:
    """The others go on in the same plan that frees it, and the newcomer takes its place."""
    scheduler, engine = Scheduler(continuous(LIMITS, batching_of(max_b=2))), FakeEngine()
    _submit(scheduler, *(request_of(one, max_tokens=9) for one in "abc"))
    run_step(scheduler, engine, now_s=0.0)
    (finished,) = only(SequenceFinished, scheduler.abort(("a",), None, now_s=0.0))
    assert (finished.sequence_id, finished.completion_tokens) == ("a", 1)

    assert _admitted(scheduler.admit(now_s=0.0)) == ["c"]
    plan = scheduler.plan()
    assert plan.release == (0,)
    assert [chunk.slot_index for chunk in plan.prefill] == [0]
    assert [row.slot_index for row in plan.decode] == [1]


def test_the_last_slot_is_released_at_once() -> None:
    """After the last sequence one plan frees the rows, and the next is empty."""
    scheduler, engine = Scheduler(continuous(LIMITS, batching_of())), FakeEngine()
    _submit(scheduler, request_of("a", max_tokens=1))
    run_step(scheduler, engine, now_s=0.0)
    assert scheduler.plan() == StepPlan(release=(0,))
    run_step(scheduler, engine, now_s=0.0)
    assert engine.memory().kv_used_bytes == 0
    assert scheduler.plan().is_empty


def test_a_row_fault_ends_its_sequence_only() -> None:
    """The row's neighbours finish with their own tokens."""
    scheduler = Scheduler(continuous(LIMITS, batching_of()))
    engine = FakeEngine(faults=FakeFaults(row_errors={(1, 2): ValueError("planted")}))
    _submit(scheduler, *(request_of(one) for one in "abc"))
    ends = {one.sequence_id: one for one in only(SequenceFinished, _run_to_end(scheduler, engine))}
    assert isinstance(ends["b"].error, RowFaultError)
    assert ends["b"].completion_tokens == 2
    assert ends["a"].reason is ends["c"].reason is FinishReason.LENGTH


def test_an_engine_fault_ends_all_rows_and_gives_back_what_they_held() -> None:
    """Slots and reservations are free at once, nothing is to release, and waiting sequences run next."""
    scheduler, engine = Scheduler(continuous(LIMITS, batching_of(max_b=2))), FakeEngine()
    _submit(scheduler, *(request_of(one) for one in "abc"))
    run_step(scheduler, engine, now_s=0.0)
    events = scheduler.fail(EngineFaultError("broken"), now_s=0.0)
    engine.reset()
    assert [one.sequence_id for one in only(SequenceFinished, events)] == ["a", "b"]
    assert (scheduler.kv_reserved_bytes, scheduler.active_loops) == (0, 0)
    assert scheduler.plan().is_empty
    assert _admitted(_run_to_end(scheduler, engine)) == ["c"]


# The window


def test_an_idle_scheduler_waits_for_company() -> None:
    """From the first submission on, until the window ends; the wait is told exactly."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(window_s=0.5)))
    _submit(scheduler, request_of("a"), now_s=1.0)
    assert scheduler.admit(1.2) == []
    assert scheduler.plan().is_empty
    assert scheduler.wait_s(1.2) == pytest.approx(0.3)
    _submit(scheduler, request_of("b"), now_s=1.4)
    assert scheduler.wait_s(1.4) == pytest.approx(0.1)

    assert _admitted(scheduler.admit(1.5)) == ["a", "b"]
    assert scheduler.wait_s(1.5) is None, "a step can run"


def test_full_batch_ends_the_window() -> None:
    """The window ends once ``max_b`` sequences wait."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(max_b=2, window_s=60.0)))
    _submit(scheduler, request_of("a"))
    assert scheduler.admit(0.0) == []
    _submit(scheduler, request_of("b"))
    assert _admitted(scheduler.admit(0.0)) == ["a", "b"]


def test_a_running_batch_is_never_delayed() -> None:
    """A request that arrives while others run is admitted at the next step."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(window_s=5.0)))
    _submit(scheduler, request_of("a"))
    scheduler.admit(5.0)
    _submit(scheduler, request_of("b"), now_s=5.0)
    assert _admitted(scheduler.admit(5.0)) == ["b"]


def test_a_window_does_not_outlast_a_timeout() -> None:
    """The engine thread is woken for a queue timeout as well."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(window_s=50.0)))
    _submit(scheduler, request_of("a"))
    assert scheduler.wait_s(4.0) == pytest.approx(LIMITS.queue_timeout_s - 4.0)
    (finished,) = only(SequenceFinished, scheduler.admit(LIMITS.queue_timeout_s))
    assert isinstance(finished.error, QueueTimeoutError)
    assert scheduler.wait_s(10.0) is None


# The KV budget


def test_defer_waits_in_strict_order() -> None:
    """The head of the queue waits until it fits, and a small one behind it does not overtake."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(budget_tokens=20)))
    engine = FakeEngine()
    _submit(
        scheduler,
        request_of("big", prompt_tokens=12, max_tokens=2),
        request_of("large", prompt_tokens=10, max_tokens=1),
        request_of("small", prompt_tokens=1, max_tokens=1),
    )
    assert _admitted(run_step(scheduler, engine, now_s=0.0)) == ["big"]
    assert (scheduler.kv_reserved_bytes, scheduler.waiting_count) == (140, 2)
    assert scheduler.admit(0.0) == []
    assert _admitted(_run_to_end(scheduler, engine)) == ["large", "small"]
    assert scheduler.kv_reserved_bytes == 0


def test_reject_answers_at_once() -> None:
    """Running and waiting sequences count; the refusal is a 429 with a retry time."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(budget_tokens=20, policy=KvPolicy.REJECT)))
    assert only(SequenceQueued, _submit(scheduler, request_of("a"), request_of("b")))
    (refused,) = only(SequenceFinished, _submit(scheduler, request_of("c")))
    assert isinstance(refused.error, KvBudgetSpentError)
    assert refused.error.retry_after_s >= 1
    scheduler.admit(0.0)
    (refused,) = only(SequenceFinished, _submit(scheduler, request_of("c")))
    assert isinstance(refused.error, KvBudgetSpentError)
    assert only(SequenceQueued, _submit(scheduler, request_of("d", prompt_tokens=1, max_tokens=3)))


@pytest.mark.parametrize("policy", list(KvPolicy))
def test_what_can_never_fit_is_refused_with_its_numbers(policy: KvPolicy) -> None:
    """An idle daemon says 400 with the bytes needed and the bytes there are; nothing queues."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(budget_tokens=20, policy=policy)))
    names = "ab" if policy is KvPolicy.DEFER else "a"
    requests = tuple(request_of(name, prompt_tokens=18) for name in names)
    events = scheduler.submit(requests, 0.0)
    assert {type(one.error) for one in only(SequenceFinished, events)} == {KvBudgetExceededError}
    error = only(SequenceFinished, events)[0].error
    assert error is not None
    assert "220 bytes" in error.message
    assert "200 bytes" in error.message
    assert (scheduler.waiting_count, len(events)) == (0, len(requests))


# Lanes


def _with_a_serial_row() -> tuple[Scheduler, FakeEngine, list[Event]]:
    """Two short sequences in the batch and a long one beside it."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(budget_tokens=100)))
    _submit(
        scheduler,
        request_of("a", max_tokens=16),
        request_of("b", max_tokens=16),
        request_of("long", prompt_tokens=20, max_tokens=20),
        request_of("next", prompt_tokens=20, max_tokens=20),
    )
    engine = FakeEngine()
    return scheduler, engine, run_step(scheduler, engine, now_s=0.0)


def test_sequence_that_pads_the_batch_too_far_runs_serially() -> None:
    """It has a slot and a lane of its own, one at a time, and says so in its mode."""
    scheduler, engine, events = _with_a_serial_row()
    modes = {one.sequence_id: one.decode_mode for one in only(SequenceAdmitted, events)}
    assert modes == {
        "a": DecodeMode.BATCHED,
        "b": DecodeMode.BATCHED,
        "long": DecodeMode.SINGLE,
    }
    assert scheduler.active_loops == 3
    assert scheduler.kv_reserved_bytes == (2 * 20 + 40) * 10
    assert "next" in _admitted(_run_to_end(scheduler, engine))


def test_lanes_take_turns() -> None:
    """While both have rows, one step is the whole batch's and the next is the serial row's."""
    scheduler, engine, _ = _with_a_serial_row()
    steps: list[tuple[int, ...]] = []
    for _ in range(10):
        steps.append(tuple(row.slot_index for row in scheduler.plan().decode))
        run_step(scheduler, engine, now_s=0.0)
    assert Counter(steps) == {(0, 1): 5, (2,): 5}
    assert all(one != other for one, other in pairwise(steps))


def test_chunks_name_their_lane() -> None:
    """A chunk of a row beside the batch names the serial lane, the others the batch."""
    scheduler = Scheduler(continuous(LIMITS, batching_of(budget_tokens=100)))
    _submit(scheduler, request_of("a"), request_of("long", prompt_tokens=50, max_tokens=20))
    scheduler.admit(0.0)
    assert [chunk.lane for chunk in scheduler.plan().prefill] == [Lane.BATCH, Lane.SERIAL]


# The books


def test_a_reservation_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at idle moments finds what a broken release leaves behind."""
    scheduler, engine = Scheduler(continuous(LIMITS, batching_of())), FakeEngine()
    _submit(scheduler, request_of("a", max_tokens=1))
    monkeypatch.setattr(scheduler._running.reservations, "release", lambda _slot_index: None)
    run_step(scheduler, engine, now_s=0.0)
    with pytest.raises(AssertionError, match="do not add up"):
        scheduler.check_invariants()


def test_sequence_outside_slots_and_queue_is_noticed() -> None:
    """A sequence that is lost between queue and slots would be a client that waits for ever."""
    scheduler = Scheduler(continuous(LIMITS, batching_of()))
    _submit(scheduler, request_of("a"))
    scheduler._waiting.remove(next(iter(scheduler._waiting)))
    with pytest.raises(AssertionError, match="open sequences"):
        scheduler.check_invariants()


def test_planning_changes_nothing() -> None:
    """The same state gives the same plan, as often as it is asked, in every phase."""
    scheduler, engine, _ = _with_a_serial_row()
    for _ in range(12):
        assert scheduler.plan() == scheduler.plan()
        run_step(scheduler, engine, now_s=0.0)
