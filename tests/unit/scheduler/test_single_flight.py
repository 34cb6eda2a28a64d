"""One generation at a time: what each verb of the scheduler does and says."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import pytest
from support.engines.fake_engine import FakeEngine, FakeFaults, spelled
from support.schedulers.sequence_samples import (
    END_OF_TEXT,
    LIMITS,
    only,
    outputs_of,
    request_of,
    run_step,
)

from machd.engine.protocol.step import SampledToken, ScoredPrompt, StepPlan, StepResult
from machd.errors import (
    ClientDisconnectedError,
    EngineFaultError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
    RowFaultError,
)
from machd.request.generation import SamplingParams
from machd.scheduler.config import single_flight
from machd.scheduler.events import (
    DecodeMode,
    Event,
    FinishReason,
    OutputGenerated,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
)
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest
from machd.scheduler.waiting import QueueLimits


def _scheduler(limits: QueueLimits = LIMITS, *, chunk_tokens: int = 512) -> Scheduler:
    return Scheduler(single_flight(limits, prefill_chunk_tokens=chunk_tokens))


def _running(
    scheduler: Scheduler, *requests: SequenceRequest, engine: FakeEngine | None = None
) -> FakeEngine:
    """Submit one by one and run a step, so that the first one is in the slot."""
    engine = engine or FakeEngine()
    for request in requests:
        scheduler.submit((request,), now_s=0.0)
    run_step(scheduler, engine, now_s=0.0)
    return engine


def _run_to_end(scheduler: Scheduler, engine: FakeEngine, now_s: float = 0.0) -> list[Event]:
    events: list[Event] = []
    for _ in range(1000):
        events += run_step(scheduler, engine, now_s)
        if scheduler.running_count + scheduler.waiting_count == 0 and scheduler.plan().is_empty:
            return events
    raise AssertionError("the scheduler does not come to an end")


def _finished(events: Items[Event]) -> list[tuple[str, FinishReason]]:
    return [(one.sequence_id, one.reason) for one in only(SequenceFinished, events)]


def test_idle_scheduler_has_nothing_to_do() -> None:
    """Nothing runs, nothing waits, and nothing is planned."""
    scheduler = _scheduler()
    assert (scheduler.mode, scheduler.slot_count) == (DecodeMode.SINGLE, 1)
    assert (scheduler.running_count, scheduler.waiting_count, scheduler.active_loops) == (0, 0, 0)
    assert scheduler.admit(now_s=0.0) == []
    assert scheduler.plan().is_empty
    scheduler.check_invariants()


def test_a_sequence_goes_through_all_its_events() -> None:
    """Queued, admitted, a token a step, and an end, each with what it promises."""
    scheduler, engine = _scheduler(), FakeEngine(spelled("hi"))

    queued = scheduler.submit((request_of("a", max_tokens=9),), now_s=1.0)
    events = _run_to_end(scheduler, engine, now_s=2.0)

    assert queued == [SequenceQueued("a", 0)]
    assert events[0] == SequenceAdmitted(
        "a", 0, DecodeMode.SINGLE, 1, 2.0, request_id="req-a", prompt_tokens=4, max_tokens=9
    )
    assert bytes(one.token_id for one in outputs_of(SampledToken, events)) == b"hi"
    end = SampledToken(0, END_OF_TEXT)
    assert events[-1] == SequenceFinished("a", FinishReason.STOP, None, 4, 0, 3, 2.0, end)


def test_one_runs_and_the_others_wait_their_turn() -> None:
    """At no step do two run, and the answers end in the order the requests came."""
    scheduler, engine = _scheduler(), FakeEngine()
    for sequence_id in "abc":
        scheduler.submit((request_of(sequence_id, max_tokens=2),), now_s=0.0)

    events: list[Event] = []
    while scheduler.waiting_count or scheduler.running_count:
        events += run_step(scheduler, engine, now_s=0.0)
        assert scheduler.running_count == scheduler.active_loops <= 1
        scheduler.check_invariants()

    assert [sequence_id for sequence_id, _ in _finished(events)] == ["a", "b", "c"]
    assert [one.active_loops for one in only(SequenceAdmitted, events)] == [1, 1, 1]


def test_a_group_is_queued_whole() -> None:
    """Every sequence of a request is told its place behind those already there."""
    scheduler = _scheduler()
    scheduler.submit((request_of("x"),), now_s=0.0)
    assert scheduler.submit((request_of("a"), request_of("b")), now_s=0.0) == [
        SequenceQueued("a", 1),
        SequenceQueued("b", 2),
    ]


def test_group_that_does_not_fit_is_refused_whole() -> None:
    """All or none: each sequence ends with the same 429, and nothing is left in the queue."""
    scheduler = _scheduler(replace(LIMITS, max_queue=2))
    _running(scheduler, request_of("x"))

    events = scheduler.submit(tuple(request_of(one) for one in "abc"), now_s=3.0)

    finished = only(SequenceFinished, events)
    assert _finished(events) == [(one, FinishReason.ERROR) for one in "abc"]
    assert {type(one.error) for one in finished} == {QueueFullError}
    assert len(events) == 3
    assert scheduler.waiting_count == 0
    assert scheduler.submit((request_of("d"), request_of("e")), now_s=3.0) == [
        SequenceQueued("d", 0),
        SequenceQueued("e", 1),
    ]


def test_the_free_slot_is_not_part_of_the_queue() -> None:
    """An idle daemon with ``max_queue`` 0 still serves one request, and only one."""
    scheduler = _scheduler(replace(LIMITS, max_queue=0))
    assert only(SequenceQueued, scheduler.submit((request_of("a"),), now_s=0.0))
    assert only(SequenceFinished, scheduler.submit((request_of("b"),), now_s=0.0))


def test_a_waiting_sequence_is_aborted_where_it_stands() -> None:
    """It ends at once with the error given, and those behind it move up."""
    scheduler = _scheduler()
    engine = _running(scheduler, request_of("x", max_tokens=1), request_of("a"), request_of("b"))
    error = ClientDisconnectedError("gone")

    (finished,) = only(SequenceFinished, scheduler.abort(("a",), error, now_s=1.0))

    assert (finished.sequence_id, finished.reason) == ("a", FinishReason.ABORT)
    assert finished.error is error
    assert finished.completion_tokens == 0
    assert [one.sequence_id for one in only(SequenceAdmitted, _run_to_end(scheduler, engine))] == [
        "b"
    ]


def test_a_running_sequence_is_aborted_and_its_slot_freed_by_the_next_plan() -> None:
    """The end counts what was generated, and the engine forgets the row before it runs again."""
    scheduler = _scheduler()
    engine = _running(scheduler, request_of("a", max_tokens=9))
    assert engine.memory().kv_used_bytes > 0

    (finished,) = only(SequenceFinished, scheduler.abort(("a",), None, now_s=1.0))

    assert (finished.reason, finished.error) == (FinishReason.ABORT, None)
    assert finished.completion_tokens == 1
    assert scheduler.running_count == 0
    assert scheduler.plan() == StepPlan(release=(0,))
    run_step(scheduler, engine, now_s=1.0)
    assert engine.memory().kv_used_bytes == 0
    assert scheduler.plan().is_empty


def test_the_slot_of_an_aborted_sequence_serves_the_next_one_in_the_same_step() -> None:
    """Freeing and prefilling share a plan, so an abort costs no step."""
    scheduler = _scheduler()
    engine = _running(scheduler, request_of("a"), request_of("b"))
    scheduler.abort(("a",), None, now_s=1.0)
    scheduler.admit(now_s=1.0)

    plan = scheduler.plan()

    assert plan.release == (0,)
    assert [(chunk.slot_index, chunk.start) for chunk in plan.prefill] == [(0, 0)]
    assert only(
        OutputGenerated, scheduler.commit(plan, engine.run(plan), now_s=1.0, duration_s=0.0)
    )


def test_aborting_what_is_not_there_is_no_fault() -> None:
    """Unknown, finished and twice-aborted ids change nothing and say nothing."""
    scheduler = _scheduler()
    engine = _running(scheduler, request_of("a", max_tokens=1), request_of("b"))
    run_step(scheduler, engine, now_s=0.0)

    assert scheduler.abort(("a", "nobody"), None, now_s=1.0) == []
    assert _finished(scheduler.abort(("b", "b"), None, now_s=1.0)) == [("b", FinishReason.ABORT)]
    assert scheduler.abort(("b",), None, now_s=1.0) == []


def test_a_stop_token_ends_and_is_not_part_of_the_text() -> None:
    """It is counted and it is the reason, but no OutputGenerated carries it."""
    scheduler, engine = _scheduler(), FakeEngine(spelled("abc"))
    scheduler.submit((request_of("s", max_tokens=9, stop_token_ids={ord("c")}),), now_s=0.0)

    events = _run_to_end(scheduler, engine)

    assert [one.token_id for one in outputs_of(SampledToken, events)] == [ord("a"), ord("b")]
    (finished,) = only(SequenceFinished, events)
    assert (finished.reason, finished.completion_tokens) == (FinishReason.STOP, 3)


def test_max_tokens_end_and_the_last_token_is_delivered() -> None:
    """Exactly ``max_tokens`` tokens come, the last one together with the end."""
    scheduler, engine = _scheduler(), FakeEngine()
    scheduler.submit((request_of("a", max_tokens=3),), now_s=0.0)

    events = _run_to_end(scheduler, engine)

    assert len(only(OutputGenerated, events)) == 3
    assert isinstance(events[-2], OutputGenerated)
    (finished,) = only(SequenceFinished, events)
    assert (finished.reason, finished.completion_tokens) == (FinishReason.LENGTH, 3)


def test_a_stop_token_at_the_very_last_position_is_a_stop() -> None:
    """A stop token at the limit finishes with ``stop``."""
    scheduler, engine = _scheduler(), FakeEngine(spelled("ab"))
    scheduler.submit((request_of("a", max_tokens=3),), now_s=0.0)
    assert _finished(_run_to_end(scheduler, engine)) == [("a", FinishReason.STOP)]


def test_without_stop_tokens_only_max_tokens_end() -> None:
    """A request that ignores the end of text runs through it."""
    scheduler, engine = _scheduler(), FakeEngine(spelled("a"))
    scheduler.submit((request_of("a", max_tokens=4, stop_token_ids=()),), now_s=0.0)
    assert _finished(_run_to_end(scheduler, engine)) == [("a", FinishReason.LENGTH)]


def test_a_prompt_is_prefilled_in_chunks() -> None:
    """A long prompt takes several steps, all but the last of which yield no token."""
    scheduler, engine = _scheduler(chunk_tokens=4), FakeEngine()
    scheduler.submit((request_of("a", prompt_tokens=10, max_tokens=1),), now_s=0.0)

    tokens = [len(only(OutputGenerated, run_step(scheduler, engine, now_s=0.0))) for _ in range(3)]

    assert tokens == [0, 0, 1]


def test_waiting_sequence_times_out() -> None:
    """At ``queue_timeout_s`` a waiting sequence ends with a 503 that says when to come back."""
    scheduler = _scheduler()
    _running(scheduler, request_of("x", max_tokens=99), request_of("a"))

    assert scheduler.admit(now_s=9.9) == []
    (finished,) = only(SequenceFinished, scheduler.admit(now_s=10.0))

    assert (finished.sequence_id, finished.reason) == ("a", FinishReason.ERROR)
    assert isinstance(finished.error, QueueTimeoutError)
    assert finished.error.retry_after_s >= 1
    assert (scheduler.running_count, scheduler.waiting_count) == (1, 0)


def test_running_sequence_times_out() -> None:
    """At ``request_timeout_s`` after arrival the slot goes to the next one in the same step."""
    scheduler = _scheduler(replace(LIMITS, queue_timeout_s=1000.0))
    _running(scheduler, request_of("a", max_tokens=99), request_of("b", arrived_s=50.0))

    assert scheduler.admit(now_s=99.9) == []
    events = scheduler.admit(now_s=100.0)

    (finished,) = only(SequenceFinished, events)
    assert (finished.sequence_id, finished.reason) == ("a", FinishReason.ERROR)
    assert isinstance(finished.error, RequestTimeoutError)
    assert [one.sequence_id for one in only(SequenceAdmitted, events)] == ["b"]


def test_a_row_fault_ends_its_sequence_only() -> None:
    """The row gets an error with a constant message, the cause stays for the log, work goes on."""
    cause = ValueError("canary")
    scheduler = _scheduler()
    engine = FakeEngine(faults=FakeFaults(row_errors={(0, 1): cause}))
    scheduler.submit((request_of("a"), request_of("b", max_tokens=1)), now_s=0.0)

    events = _run_to_end(scheduler, engine)

    assert _finished(events) == [("a", FinishReason.ERROR), ("b", FinishReason.LENGTH)]
    error = only(SequenceFinished, events)[0].error
    assert isinstance(error, RowFaultError)
    assert error.__cause__ is cause
    assert "canary" not in error.message
    assert only(SequenceFinished, events)[0].completion_tokens == 1


def test_engine_fault_ends_running_and_spares_waiting_sequences() -> None:
    """After ``fail`` the slot is free and the plan releases nothing: the engine forgot all rows."""
    scheduler = _scheduler()
    engine = _running(scheduler, request_of("a"), request_of("b", max_tokens=1))
    error = EngineFaultError("broken")

    (finished,) = only(SequenceFinished, scheduler.fail(error, now_s=1.0))
    engine.reset()

    assert (finished.sequence_id, finished.reason) == ("a", FinishReason.ERROR)
    assert finished.error is error
    assert finished.completion_tokens == 1
    assert scheduler.waiting_count == 1
    assert scheduler.plan().is_empty
    assert _finished(_run_to_end(scheduler, engine)) == [("b", FinishReason.LENGTH)]


def test_shutdown_ends_waiting_sequences_as_well() -> None:
    """With ``include_waiting`` every sequence finishes, in order."""
    scheduler = _scheduler()
    _running(scheduler, *(request_of(one) for one in "abc"))

    events = scheduler.fail(EngineFaultError("broken"), now_s=1.0, include_waiting=True)

    assert _finished(events) == [(one, FinishReason.ERROR) for one in "abc"]
    assert (scheduler.running_count, scheduler.waiting_count) == (0, 0)
    scheduler.check_invariants()


def test_failing_while_idle_says_nothing() -> None:
    """Without sequences there are no events."""
    assert _scheduler().fail(EngineFaultError("x"), now_s=0.0, include_waiting=True) == []


@pytest.mark.parametrize("steps", range(6))
def test_a_failed_run_leaves_the_state_it_was_planned_from(steps: int) -> None:
    """Planning is pure: a plan that is thrown away is planned again, equal, at every phase."""
    scheduler, engine = _scheduler(chunk_tokens=2), FakeEngine()
    scheduler.submit((request_of("a", max_tokens=3), request_of("b")), now_s=0.0)
    for _ in range(steps):
        run_step(scheduler, engine, now_s=0.0)
    scheduler.admit(now_s=0.0)

    assert scheduler.plan() == scheduler.plan()
    assert scheduler.plan() == scheduler.plan()
    scheduler.check_invariants()


def test_a_result_for_an_empty_slot_is_a_broken_engine() -> None:
    """Tokens and faults of empty slots are programmer errors, never another sequence's."""
    stray = FakeEngine(faults=FakeFaults(row_errors={(0, 0): ValueError()}))
    scheduler = _scheduler()
    scheduler.submit((request_of("a"),), now_s=0.0)
    scheduler.admit(now_s=0.0)
    for engine in (FakeEngine(), stray):
        result = engine.run(scheduler.plan())
        with pytest.raises(AssertionError, match="running row"):
            _scheduler().commit(StepPlan(), result, now_s=0.0, duration_s=0.0)


def test_committing_nothing_changes_nothing() -> None:
    """An empty step is no event."""
    scheduler = _scheduler()
    assert scheduler.commit(StepPlan(), StepResult(), now_s=0.0, duration_s=0.0) == []


def test_a_started_request_does_not_time_out_in_the_queue() -> None:
    """Once one of its sequences was admitted, only the whole request's time is limited."""
    scheduler = Scheduler(single_flight(LIMITS))
    scheduler.submit(
        (request_of("a/0", group_id="a"), request_of("a/1", group_id="a"), request_of("b")), 0.0
    )
    scheduler.admit(1.0)

    late = scheduler.admit(LIMITS.queue_timeout_s)
    assert [
        (one.sequence_id, type(one.error)) for one in late if isinstance(one, SequenceFinished)
    ] == [("b", QueueTimeoutError)]

    over = scheduler.admit(LIMITS.request_timeout_s)
    assert {
        (one.sequence_id, type(one.error)) for one in over if isinstance(one, SequenceFinished)
    } == {("a/0", RequestTimeoutError), ("a/1", RequestTimeoutError)}


def test_row_that_fails_behind_its_prompt_has_no_output() -> None:
    """Its request is told the fault, and not the log-probabilities of the prompt before it."""
    faults = FakeFaults(row_errors={(0, 0): ValueError("planted")})
    scheduler, engine = _scheduler(), FakeEngine(faults=faults)
    scheduler.submit((request_of("a", sampling=SamplingParams(prompt_logprobs=1)),), 1.0)

    events = _run_to_end(scheduler, engine)

    assert not only(OutputGenerated, events)
    assert _finished(events) == [("a", FinishReason.ERROR)]


@pytest.mark.parametrize("chunk_tokens", [2, 512])
def test_sequence_without_completion_ends_with_its_prompt(chunk_tokens: int) -> None:
    """It is told the prompt's log-probabilities, then its end, and its row is freed."""
    scheduler, engine = _scheduler(chunk_tokens=chunk_tokens), FakeEngine()
    sampling = SamplingParams(prompt_logprobs=1)
    scheduler.submit((request_of("a", prompt_tokens=5, max_tokens=0, sampling=sampling),), 1.0)

    events = _run_to_end(scheduler, engine, now_s=2.0)

    (scored,) = outputs_of(ScoredPrompt, events)
    assert [one.position for one in scored.logprobs] == [1, 2, 3, 4]
    assert not outputs_of(SampledToken, events)
    assert events[-2:] == [
        OutputGenerated("a", scored, 2.0),
        SequenceFinished("a", FinishReason.LENGTH, None, 5, 0, 0, 2.0),
    ]
    assert engine.memory().kv_used_bytes == 0
