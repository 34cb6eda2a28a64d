"""A change of the scheduler config on the running engine thread: when it applies, to what, and its failures."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.engine_thread import STOPPED, Thread, running_thread
from support.engines.fake_engine import FakeEngine, FakeFaults, lettered
from support.engines.step_gate import StepGate, at_decode
from support.schedulers.sequence_samples import LIMITS, batching_of, outputs_of, request_of

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult, Results
from machd.clock import Clock, SystemClock
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.step import SampledToken, StepPlan
from machd.errors import (
    EngineFaultError,
    KvBudgetExceededError,
    ModelFormatError,
    QueueFullError,
    QueueTimeoutError,
)
from machd.link.snapshot import LoopSnapshot
from machd.request.generation import SamplingParams
from machd.scheduler.config import SchedulerConfig, continuous, single_flight
from machd.scheduler.events import (
    DecodeMode,
    Event,
    FinishReason,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
    SequenceResumed,
    SuspendReason,
)
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest

PROBED = (ProbeResult("batch_parity", Outcome.PASSED, evidence=Evidence(1, 0.0, 0.0, 1)),)


class _ScriptedProbe:
    """Finds something when it is asked again, after ``during`` has had its way with the engine."""

    def __init__(self, error: Exception | None = None) -> None:
        """Measure well, or fail."""
        self.error = error
        self.is_reached = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()
        self.count = 0

    def __call__(self, engine: Engine) -> Results:
        """Nothing is known at the start."""
        del engine
        return ()

    def remeasure(self, engine: Engine) -> tuple[ProbeResult, ...]:
        """Measure."""
        self.count += 1
        assert engine.memory().kv_used_bytes == 0, "measured on an engine with rows"
        self.is_reached.set()
        assert self.may_end.wait(CEILING_S)
        if self.error is not None:
            raise self.error
        return PROBED

    def measure_next(self, engine: Engine) -> Results:
        """Nothing is measured beside it."""
        del engine
        return None


class _SteppingProbe(_ScriptedProbe):
    """Takes steps until it may end, as a real one does, and takes every error for the model's."""

    def remeasure(self, engine: Engine) -> tuple[ProbeResult, ...]:
        """Measure."""
        deadline_s = SystemClock().monotonic_s() + CEILING_S
        while not (self.is_reached.is_set() and self.may_end.is_set()):
            self.is_reached.set()
            with contextlib.suppress(Exception):
                engine.run(StepPlan())
            assert SystemClock().monotonic_s() < deadline_s
        return super().remeasure(engine)


@contextlib.contextmanager
def _measuring(
    probe: _ScriptedProbe, scheduler: Scheduler | None = None, clock: Clock | None = None
) -> Iterator[tuple[Thread, Future[None]]]:
    """A thread that measures until the block has ended, or longer than it."""
    probe.may_end.clear()
    scheduler = scheduler or Scheduler(single_flight(LIMITS))
    with running_thread(probe=probe, clock=clock, make_scheduler=lambda _: scheduler) as thread:
        done = thread.change_config(_batched(), measure=True)
        assert probe.is_reached.wait(CEILING_S)
        try:
            yield thread, done
        finally:
            probe.may_end.set()


@pytest.fixture(name="logged", autouse=True)
def _logged() -> Iterator[list[EventDict]]:
    with capture_logs() as entries:
        yield entries


def _batched(
    max_b: int = 4, *, coalesce: bool = False, budget_tokens: int = 100_000
) -> SchedulerConfig:
    return continuous(
        LIMITS, batching_of(max_b=max_b, coalesce=coalesce, budget_tokens=budget_tokens)
    )


def _results(thread: Thread) -> Results:
    """Return the loop's probe results."""
    assert thread.loop.state is not None
    return thread.loop.state.results


def _admissions(thread: Thread) -> list[tuple[str, DecodeMode]]:
    return [(one.sequence_id, one.decode_mode) for one in thread.published.of(SequenceAdmitted)]


# When


def test_what_runs_is_suspended_and_goes_on_in_the_new_way_with_what_waits() -> None:
    """One runs, two wait: after the step that runs, all three run together, and no token is twice or missing."""
    gate = StepGate(at_decode)
    with running_thread(FakeEngine(before_step=gate), gate=gate) as thread:
        request = request_of("a", max_tokens=9)
        thread.submit(request)
        gate.wait_until_held()
        thread.submit(request_of("b"), request_of("c"))
        thread.published.wait_for(SequenceQueued, 1)
        before = thread.loop.snapshot
        done = thread.change_config(_batched())
        gate.let()
        done.result(CEILING_S)
        assert not thread.published.of(SequenceFinished), "it is suspended long before its end"
        after = thread.loop.snapshot
        gate.open()
        ends = thread.published.ends(3)
    assert (before.mode, after.mode) == (DecodeMode.SINGLE, DecodeMode.BATCHED)
    assert not after.is_changing_config
    assert [one.reason for one in ends.values()] == [FinishReason.LENGTH] * 3
    assert [ends[one].completion_tokens for one in "abc"] == [9, 4, 4]
    assert _admissions(thread) == [
        ("a", DecodeMode.SINGLE),
        ("b", DecodeMode.BATCHED),
        ("c", DecodeMode.BATCHED),
    ]
    (resumed,) = thread.published.of(SequenceResumed)
    assert (resumed.sequence_id, resumed.reason) == ("a", SuspendReason.CONFIG)
    tokens = outputs_of(SampledToken, thread.published.events, "a")
    assert [one.token_id for one in tokens] == [
        lettered(request.prompt, request.sampling, at) for at in range(9)
    ]


def test_a_sequence_that_cannot_run_under_the_new_config_ends_under_the_old_one() -> None:
    """A smaller KV budget costs no answer that has begun; no sequence is admitted until it has ended."""
    gate = StepGate(at_decode)
    with running_thread(FakeEngine(before_step=gate), gate=gate) as thread:
        thread.submit(request_of("long", max_tokens=20))
        gate.wait_until_held()
        done = thread.change_config(_batched(budget_tokens=20))
        thread.submit(request_of("b"))
        gate.step_until(lambda: bool(thread.published.of(SequenceQueued)[1:]), "b is queued")
        gate.let()
        gate.wait_until_held()
        assert _admissions(thread) == [("long", DecodeMode.SINGLE)]
        assert not done.done()
        gate.open()
        done.result(CEILING_S)
        ends = thread.published.ends(2)
    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}
    assert not thread.published.of(SequenceResumed)


def test_an_idle_thread_switches_at_once_and_back() -> None:
    """With no running and no waiting request the change is applied in one turn of the loop."""
    with running_thread() as thread:
        for mode, config in (
            (DecodeMode.BATCHED, _batched(3)),
            (DecodeMode.SINGLE, single_flight(LIMITS)),
        ):
            thread.change_config(config).result(CEILING_S)
            assert thread.loop.snapshot.mode is mode
            assert thread.loop.snapshot.slot_count == config.slot_count
            assert thread.loop.idle_snapshot.mode is mode


def test_it_may_be_asked_for_before_the_model_is_loaded() -> None:
    """It is taken in the first turn, with the limits that were set after it."""
    may_load = threading.Event()

    def load() -> Engine:
        assert may_load.wait(CEILING_S)
        return FakeEngine()

    with running_thread(load=load) as thread:
        done = thread.change_config(_batched(3))
        thread.set_queue_limits(replace(LIMITS, max_queue=0))
        may_load.set()
        done.result(CEILING_S)
        thread.submit(*(request_of(one, group_id="g") for one in "abcd"))
        ends = thread.published.ends(4)
    assert thread.loop.snapshot.slot_count == 3
    assert {type(one.error) for one in ends.values()} == {QueueFullError}


def test_a_waiting_request_that_can_never_fit_is_refused_and_blocks_no_other() -> None:
    """It ends with the budget's error; the next request is served."""
    gate = StepGate(at_decode)
    with running_thread(FakeEngine(before_step=gate), gate=gate) as thread:
        thread.submit(request_of("a"))
        gate.wait_until_held()
        thread.submit(request_of("large", max_tokens=50))
        thread.submit(request_of("small", max_tokens=5))
        _ = thread.change_config(_batched(budget_tokens=20))
        gate.open()
        ends = thread.published.ends(3)
    assert isinstance(ends["large"].error, KvBudgetExceededError)
    assert ends["small"].reason is FinishReason.LENGTH


def test_who_waits_too_long_for_a_switch_is_turned_away() -> None:
    """Held admission is no reason to wait for ever."""
    clock, gate = ManualClock(0.0), StepGate(at_decode)
    with running_thread(FakeEngine(before_step=gate), gate=gate, clock=clock) as thread:
        thread.submit(request_of("a", max_tokens=50))
        gate.wait_until_held()
        thread.change_config(_batched())
        thread.submit(request_of("b"))
        clock.advance(LIMITS.queue_timeout_s)
        gate.step_until(lambda: bool(thread.published.of(SequenceQueued)[1:]), "b is queued")
        ends = thread.published.ends(1)
    assert isinstance(ends["b"].error, QueueTimeoutError)


# Several wishes


def test_the_later_wish_wins_and_both_are_told() -> None:
    """Of two pending changes the first is never applied; the model is measured if either asks for it."""
    gate, probe, asked = StepGate(at_decode), _ScriptedProbe(), list[str]()

    def first() -> SchedulerConfig:
        asked.append("first")
        return _batched(2)

    with running_thread(FakeEngine(before_step=gate), gate=gate, probe=probe) as thread:
        thread.submit(request_of("a"))
        gate.wait_until_held()
        futures = [
            thread.change_config(first, measure=True),
            thread.change_config(_batched(3)),
        ]
        gate.open()
        for future in futures:
            future.result(CEILING_S)
        assert thread.loop.snapshot.slot_count == 3
    assert (asked, probe.count) == ([], 1)
    assert _results(thread) == PROBED


def test_limits_hold_at_once_and_are_not_undone_by_a_switch_asked_for_before() -> None:
    """The config was asked for under older settings; its limits are those set since."""
    gate = StepGate(at_decode)
    with running_thread(FakeEngine(before_step=gate), gate=gate) as thread:
        thread.submit(request_of("a", max_tokens=50))
        gate.wait_until_held()
        done = thread.change_config(_batched(1))
        thread.set_queue_limits(replace(LIMITS, max_queue=1))
        thread.submit(request_of("b"))
        thread.submit(request_of("c"))
        gate.step_until(lambda: bool(thread.published.of(SequenceQueued)[1:]), "b is queued")
        assert isinstance(thread.published.ends(1)["c"].error, QueueFullError)
        thread.abort("a", "b")
        gate.open()
        done.result(CEILING_S)
        thread.submit(*(request_of(one, group_id="g") for one in "def"))
        ends = thread.published.ends(6)
    assert {type(ends[one].error) for one in "def"} == {QueueFullError}


def test_limits_may_grow_while_requests_wait() -> None:
    """A request that was refused before the change is accepted after it."""
    with running_thread() as thread:
        thread.set_queue_limits(replace(LIMITS, max_queue=0))
        thread.submit(request_of("a", group_id="g"), request_of("b", group_id="g"))
        thread.published.ends(2)
        thread.set_queue_limits(LIMITS)
        thread.submit(request_of("c", group_id="h"), request_of("d", group_id="h"))
        ends = thread.published.ends(4)
    assert [ends[one].reason for one in "abcd"] == [FinishReason.ERROR] * 2 + [
        FinishReason.LENGTH
    ] * 2


def test_a_switch_asked_for_after_limits_brings_its_own() -> None:
    """The later of two limits applies, in whichever message it came."""
    gate = StepGate(at_decode)
    with running_thread(FakeEngine(before_step=gate), gate=gate) as thread:
        thread.submit(request_of("a"))
        gate.wait_until_held()
        thread.set_queue_limits(replace(LIMITS, max_queue=0))
        done = thread.change_config(_batched(1))
        gate.open()
        done.result(CEILING_S)
        thread.submit(request_of("b", group_id="g"), request_of("c", group_id="g"))
        ends = thread.published.ends(3)
    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}


def test_who_is_told_finds_the_new_way_in_the_snapshots() -> None:
    """Both of them are of the new config at the very moment that the future resolves."""
    seen: list[LoopSnapshot] = []
    with running_thread() as thread:
        thread.submit(request_of("a"))
        done = thread.change_config(_batched(3))
        done.add_done_callback(
            lambda _done: seen.extend([thread.loop.snapshot, thread.loop.idle_snapshot])
        )
        done.result(CEILING_S)
        thread.published.ends(1)
    assert [(one.slot_count, one.is_changing_config) for one in seen] == [(3, False)] * 2


# Withdrawn


def test_waiting_sequences_are_admitted_at_once_when_a_change_is_withdrawn() -> None:
    """A sequence too large for the smaller budget runs on; after the withdrawal the next one has a slot."""
    gate = StepGate(at_decode)
    with running_thread(
        FakeEngine(before_step=gate),
        gate=gate,
        make_scheduler=lambda _engine: Scheduler(_batched(4)),
    ) as thread:
        thread.submit(request_of("a", max_tokens=50))
        gate.wait_until_held()
        futures = [thread.change_config(_batched(4, budget_tokens=30))]
        thread.submit(request_of("b"))
        gate.step_until(lambda: bool(thread.published.of(SequenceQueued)[1:]), "b is queued")
        futures.append(thread.change_config(_batched(4)))
        gate.step_until(lambda: len(_admissions(thread)) > 1, "b is admitted")
        for future in futures:
            future.result(CEILING_S)
        assert not thread.loop.is_changing_config
        assert not thread.loop.snapshot.is_changing_config
        assert not thread.published.of(SequenceFinished)
        gate.open()
        ends = thread.published.ends(2)
    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}


def test_a_withdrawn_change_applies_its_limits() -> None:
    """Limits of the last change asked for hold, whether the config changes or not."""
    gate = StepGate(at_decode)
    with running_thread(
        FakeEngine(before_step=gate),
        gate=gate,
        make_scheduler=lambda _engine: Scheduler(single_flight(LIMITS)),
    ) as thread:
        thread.submit(request_of("a", max_tokens=50))
        gate.wait_until_held()
        thread.set_queue_limits(replace(LIMITS, max_queue=0))
        thread.change_config(_batched())
        done = thread.change_config(single_flight(LIMITS))
        gate.step_until(done.done, "it is withdrawn")
        thread.submit(request_of("b"))
        gate.open()
        assert {one.reason for one in thread.published.ends(2).values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("first_is_measured", "prefill_chunk_tokens"),
    [(True, 512), (False, 64)],
    ids=["measured", "other chunks"],
)
def test_what_is_not_in_force_or_to_be_measured_is_not_taken_back(
    first_is_measured: bool,  # noqa: FBT001
    prefill_chunk_tokens: int,
) -> None:
    """A measurement is still made, and a pace of its own is no less a change than a mode is."""
    gate, probe = StepGate(at_decode), _ScriptedProbe()
    with running_thread(
        FakeEngine(before_step=gate),
        gate=gate,
        probe=probe,
        make_scheduler=lambda _engine: Scheduler(single_flight(LIMITS)),
    ) as thread:
        thread.submit(request_of("a", max_tokens=20))
        gate.wait_until_held()
        futures = [
            thread.change_config(single_flight(LIMITS), measure=first_is_measured),
            thread.change_config(single_flight(LIMITS, prefill_chunk_tokens=prefill_chunk_tokens)),
        ]
        gate.let()
        for future in futures:
            future.result(CEILING_S)
        gate.open()
        thread.published.ends(1)
        assert len(thread.published.of(SequenceResumed)) == 1, "it was suspended for it"
    assert probe.count == first_is_measured


# Measuring


def test_who_waits_is_looked_after_while_the_model_is_measured() -> None:
    """They are queued, turned away in time, may leave, and are served when it is over."""
    clock, probe = ManualClock(0.0), _SteppingProbe()
    with _measuring(probe, clock=clock) as (thread, done):
        thread.submit(request_of("late"))
        thread.published.wait_for(SequenceQueued)
        clock.advance(LIMITS.queue_timeout_s)
        assert isinstance(thread.published.ends(1)["late"].error, QueueTimeoutError)
        thread.submit(request_of("gone", arrived_s=clock.monotonic_s()))
        thread.submit(request_of("served", arrived_s=clock.monotonic_s()))
        thread.abort("gone")
        assert thread.published.ends(2)["gone"].reason is FinishReason.ABORT
        wait_until(lambda: thread.loop.snapshot.waiting_count == 1, "one is seen to wait")
        assert thread.loop.snapshot.is_changing_config
        assert not done.done()
        probe.may_end.set()
        done.result(CEILING_S)
        assert thread.published.ends(3)["served"].reason is FinishReason.LENGTH
    assert _admissions(thread) == [("served", DecodeMode.BATCHED)]


@pytest.mark.parametrize("is_failing", [False, True])
def test_what_is_asked_for_meanwhile_is_made_afterwards(is_failing: bool) -> None:  # noqa: FBT001
    """It wins over what the model was measured for, and does not suffer from its failure."""
    error = OSError("planted") if is_failing else None
    probe = _SteppingProbe(error)
    with _measuring(probe) as (thread, first):
        newer = [thread.change_config(_batched(2)), thread.change_config(_batched(3))]
        thread.submit(request_of("a"))
        thread.published.wait_for(SequenceQueued)
        probe.may_end.set()
        assert first.exception(CEILING_S) is error
        for one in newer:
            one.result(CEILING_S)
        assert thread.loop.snapshot.slot_count == 3
        thread.published.ends(1)
    assert _admissions(thread) == [("a", DecodeMode.BATCHED)]
    assert probe.count == 1


def test_a_stop_does_not_wait_for_a_measurement_between_two_steps() -> None:
    """The probe would go on; the thread ends without a fault, and waiting requests get the stop's error."""
    with _measuring(_SteppingProbe()) as (thread, done):
        thread.submit(request_of("a"))
        thread.published.wait_for(SequenceQueued)
        thread.loop.stop(STOPPED)
        assert thread.loop.join(CEILING_S)
        assert done.exception(0) is STOPPED
        assert thread.fault() is None
        assert thread.published.ends(1)["a"].error is STOPPED


def test_a_stop_answers_callers_while_the_thread_hangs() -> None:
    """Callers before and after the stop are answered before the measurement ends, whose end changes nothing."""
    with _measuring(_ScriptedProbe()) as (thread, done):
        thread.loop.stop(STOPPED)
        assert done.exception(0) is STOPPED
        assert not thread.loop.is_changing_config
        assert thread.change_config(_batched()).exception(0) is STOPPED
        assert thread.loop.is_alive
    assert thread.fault() is None


def test_a_fault_of_ours_while_measuring_is_not_taken_for_the_models() -> None:
    """The thread ends with it, as at any other time."""

    class _Broken(Scheduler):
        def submit(self, requests: tuple[SequenceRequest, ...], now_s: float) -> list[Event]:
            del requests, now_s
            raise ArithmeticError("planted")

    with _measuring(_SteppingProbe(), _Broken(single_flight(LIMITS))) as (thread, done):
        thread.submit(request_of("a"))
        assert isinstance(thread.fault(), ArithmeticError)
        assert isinstance(done.exception(CEILING_S), EngineFaultError)


def test_the_new_config_is_made_from_the_new_results() -> None:
    """The config is made after the results are there, and the caller is answered after that."""
    seen: list[Results] = []
    with running_thread(probe=_ScriptedProbe()) as thread:
        assert _results(thread) == ()

        def make_config() -> SchedulerConfig:
            seen.append(_results(thread))
            return _batched()

        thread.change_config(make_config, measure=True).result(CEILING_S)
    assert seen == [PROBED]


def test_measuring_is_no_stall_until_it_takes_far_too_long() -> None:
    """The heartbeat is young for the time that a measurement may take, and ages after that."""
    clock, probe = ManualClock(0.0), _ScriptedProbe()
    probe.may_end.clear()
    with running_thread(clock=clock, probe=probe) as thread:
        done = thread.change_config(_batched(), measure=True)
        assert probe.is_reached.wait(CEILING_S)
        try:
            assert thread.loop.snapshot.is_changing_config
            clock.advance(100.0)
            young_s = thread.loop.heartbeat_age_s
            clock.advance(100.0)
            old_s = thread.loop.heartbeat_age_s
        finally:
            probe.may_end.set()
        done.result(CEILING_S)
        assert thread.loop.heartbeat_age_s == 0.0
    assert (young_s, old_s) == (0.0, 80.0)


# What if it fails


@pytest.mark.parametrize("is_probe", [True, False], ids=["probe", "change"])
def test_a_switch_that_fails_changes_nothing_and_admission_goes_on(
    logged: list[EventDict],
    is_probe: bool,  # noqa: FBT001
) -> None:
    """The caller gets the error; waiting requests are served as before, and the next change works."""
    error = ValueError("planted")
    probe = _ScriptedProbe(error if is_probe else None)

    def make_config() -> SchedulerConfig:
        raise error

    with running_thread(probe=probe) as thread:
        done = thread.change_config(make_config, measure=is_probe)
        thread.submit(request_of("a"))
        assert done.exception(CEILING_S) is error
        assert thread.published.ends(1)["a"].reason is FinishReason.LENGTH
        assert not thread.loop.snapshot.is_changing_config
        thread.change_config(_batched()).result(CEILING_S)
    assert _admissions(thread) == [("a", DecodeMode.SINGLE)]
    assert [one["event"] for one in logged].count("scheduler.config_not_changed") == 1
    assert _results(thread) == ()


def test_rows_of_a_measurement_that_broke_off_are_forgotten() -> None:
    """The engine is as it was; the books are checked right after."""

    class _Leaves(_ScriptedProbe):
        def remeasure(self, engine: Engine) -> tuple[ProbeResult, ...]:
            chunk = Scheduler(single_flight(LIMITS))
            chunk.submit((request_of("probe"),), 0.0)
            chunk.admit(0.0)
            engine.run(chunk.plan())
            raise OSError("planted")

    with running_thread(probe=_Leaves()) as thread:
        done = thread.change_config(_batched(), measure=True)
        assert isinstance(done.exception(CEILING_S), OSError)
        thread.submit(request_of("a"))
        assert thread.published.ends(1)["a"].reason is FinishReason.LENGTH


def test_an_engine_that_cannot_forget_a_measurement_is_given_up() -> None:
    """Its rows would occupy slots for good; the caller gets the fault, too."""
    engine = FakeEngine(faults=FakeFaults(reset_error=OSError("planted")))
    with running_thread(engine, probe=_ScriptedProbe(ValueError("planted"))) as thread:
        done = thread.change_config(_batched(), measure=True)
        assert isinstance(done.exception(CEILING_S), EngineFaultError)
        assert isinstance(thread.fault(), OSError)


@pytest.mark.parametrize("is_stop", [True, False], ids=["stop", "fault"])
def test_a_thread_that_ends_answers_all_callers_of_a_change(is_stop: bool) -> None:  # noqa: FBT001
    """Pending changes, changes in the inbox behind the stop, and later ones are all answered."""
    gate = StepGate(at_decode)
    faults = FakeFaults(reset_error=OSError("planted"))
    if not is_stop:
        faults.step_errors = dict.fromkeys(range(1, 9), ValueError("planted"))
    engine = FakeEngine(before_step=gate, faults=faults)
    with running_thread(engine, gate=gate) as thread:
        thread.submit(request_of("a", max_tokens=50))
        gate.wait_until_held()
        futures = [thread.change_config(_batched())]
        if is_stop:
            thread.loop.stop(STOPPED)
        futures.append(thread.change_config(_batched()))
        gate.open()
        errors = [one.exception(CEILING_S) for one in futures]
        assert thread.loop.join(CEILING_S)
        errors.append(thread.change_config(_batched()).exception(CEILING_S))
    assert {type(one) for one in errors} == {type(STOPPED) if is_stop else EngineFaultError}


def test_a_model_that_does_not_load_leaves_nobody_waiting_for_a_switch() -> None:
    """Asked for before or after, it is refused."""
    may_load = threading.Event()

    def load() -> Engine:
        assert may_load.wait(CEILING_S)
        raise ModelFormatError("planted")

    with running_thread(load=load) as thread:
        before = thread.change_config(_batched())
        may_load.set()
        assert isinstance(before.exception(CEILING_S), EngineFaultError)
        assert isinstance(thread.change_config(_batched()).exception(CEILING_S), EngineFaultError)


def test_who_asked_cannot_cancel_what_others_wait_for() -> None:
    """A client that leaves cancels its wait; the thread answers the future all the same."""
    gate = StepGate(at_decode)
    with running_thread(FakeEngine(before_step=gate), gate=gate) as thread:
        thread.submit(request_of("a"))
        gate.wait_until_held()
        done = thread.change_config(_batched())
        assert not done.cancel()
        gate.open()
        done.result(CEILING_S)
        assert thread.loop.is_alive


def test_switching_at_any_step_changes_no_token() -> None:
    """Six requests, a switch after each step: every one gets what it gets alone, and ends well."""
    steps = 0
    threads: list[Thread] = []
    configs = [single_flight(LIMITS), _batched(2, coalesce=True), _batched(4)]

    def before_step(_plan: StepPlan) -> None:
        nonlocal steps
        steps += 1
        threads[0].change_config(configs[steps % 3])

    with running_thread(FakeEngine(before_step=before_step)) as thread:
        threads.append(thread)
        for number in range(6):
            thread.submit(
                request_of(
                    f"s{number}", max_tokens=3 + number, sampling=SamplingParams(seed=number // 2)
                )
            )
        ends = thread.published.ends(6)
        wait_until(lambda: not thread.loop.snapshot.is_changing_config, "the last switch is done")
    assert [ends[f"s{number}"].completion_tokens for number in range(6)] == [3, 4, 5, 6, 7, 8]
    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}
    for number in range(6):
        sampling = SamplingParams(seed=number // 2)
        tokens = outputs_of(SampledToken, thread.published.events, f"s{number}")
        assert [one.token_id for one in tokens] == [
            lettered(tuple(range(4)), sampling, position) for position in range(3 + number)
        ]
