"""The engine thread: loading, stepping, faults, stopping, and its pulse.

A scripted engine runs on the real thread. Tests hold its steps at a gate or act from inside them,
so that nothing here depends on how fast the machine is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.engine_thread import (
    CHUNK_TOKENS,
    STOPPED,
    Thread,
    running_thread,
)
from support.engines.fake_engine import FakeEngine, FakeFaults, spelled
from support.engines.step_gate import StepGate, at_decode
from support.schedulers.sequence_samples import LIMITS, batching_of, outputs_of, request_of

from machd.clock import SystemClock
from machd.engine.protocol.engine import Engine
from machd.engine.protocol.memory import MemoryReading
from machd.engine.protocol.step import SampledToken, StepPlan, StepResult
from machd.errors import (
    ClientDisconnectedError,
    DrainDeadlineError,
    EngineFaultError,
    MachdError,
    ModelFormatError,
    RowFaultError,
)
from machd.scheduler.config import SchedulerConfig, continuous, single_flight
from machd.scheduler.events import (
    EngineFaulted,
    Event,
    FinishReason,
    InvariantBroken,
    OutputGenerated,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
    SequenceResumed,
    SequenceStarted,
    StepCompleted,
)
from machd.scheduler.open_sequences import OpenSequences
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.sequence import Sequence

_NEVER_S = 3600.0
"""Longer than any test waits: what happens nevertheless has not waited for it."""


class _BrokenScheduler(Scheduler):
    """Its state is corrupt: neither committing nor failing works any more."""

    def commit(
        self, plan: StepPlan, result: StepResult, now_s: float, *, duration_s: float
    ) -> list[Event]:
        """Raise."""
        del plan, result, now_s, duration_s
        raise AssertionError("planted in commit")

    def fail(
        self, error: MachdError, now_s: float, *, include_waiting: bool = False
    ) -> list[Event]:
        """Raise."""
        del error, now_s, include_waiting
        raise AssertionError("planted in fail")


def _raises(error: BaseException) -> Callable[..., Engine]:
    def load(*_: object) -> Engine:
        raise error

    return load


@pytest.fixture(name="logged", autouse=True)
def _logged() -> Iterator[list[EventDict]]:
    """Yield what the thread logs, instead of pages of traceback on the terminal."""
    with capture_logs() as entries:
        yield entries


# Loading


def test_the_model_is_loaded_on_the_engine_thread() -> None:
    """The loaded future has the engine, and one thread makes every call to it."""
    threads: set[str] = set()
    engine = FakeEngine(before_step=lambda _plan: threads.add(threading.current_thread().name))

    def load() -> Engine:
        threads.add(threading.current_thread().name)
        return engine

    with running_thread(load=load) as thread:
        thread.loop.loaded.result(CEILING_S)
        assert thread.loop.front is engine
        assert thread.loop.is_alive
        thread.submit(request_of(max_tokens=2))
        thread.published.ends()

    assert threads == {"machd-engine"}
    assert thread.published.threads == {"machd-engine"}
    assert not thread.loop.is_alive


@pytest.mark.parametrize("error", [ModelFormatError("corrupt"), MemoryError(), SystemExit(1)])
def test_a_load_that_fails_is_told_and_ends_the_thread(error: BaseException) -> None:
    """Whatever the loader raises reaches ``loaded``; no thread is left behind it."""
    with running_thread(load=_raises(error)) as thread:
        assert thread.loop.loaded.exception(CEILING_S) is error
        assert thread.fault() is None
        assert thread.loop.join(CEILING_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_start_that_fails_after_loading_is_told_as_well() -> None:
    """A scheduler that cannot be made reaches ``loaded``, and ends the thread."""
    make_scheduler = _raises(OSError("planted"))
    with running_thread(
        FakeEngine(),
        make_scheduler=make_scheduler,  # type: ignore[arg-type]  # it returns nothing at all
    ) as thread:
        assert thread.loop.join(CEILING_S)
        assert thread.loop.loaded.done(), "who waits for the model waits for ever"
        assert isinstance(thread.loop.loaded.exception(0), OSError)
        assert thread.loop.finished.done()


# Steps


def test_the_events_of_a_generation_come_in_order() -> None:
    """Queued, admitted, started, then a token and a step fact a step, and the end before its step."""
    with running_thread(FakeEngine(spelled("hi"))) as thread:
        thread.submit(request_of("a", prompt_tokens=6, max_tokens=9))
        thread.published.wait_for(StepCompleted, 4)

    kinds = [type(event) for event in thread.published.events]
    assert kinds == [
        SequenceQueued,
        SequenceAdmitted,
        StepCompleted,
        SequenceStarted,
        OutputGenerated,
        StepCompleted,
        OutputGenerated,
        StepCompleted,
        SequenceFinished,
        StepCompleted,
    ]
    assert [
        (step.prefill_tokens, step.batch_width) for step in thread.published.of(StepCompleted)
    ] == [(4, 0), (2, 1), (0, 1), (0, 1)]
    said = outputs_of(SampledToken, thread.published.events)
    assert bytes(one.token_id for one in said) == b"hi"


def test_requests_are_served_one_after_the_other() -> None:
    """Many requests, each answered by its own sequence, in the order they came."""
    with running_thread() as thread:
        for number in range(8):
            thread.submit(request_of(f"s{number}", max_tokens=3))
        ends = thread.published.ends(8)

    assert list(ends) == [f"s{number}" for number in range(8)]
    assert {end.reason for end in ends.values()} == {FinishReason.LENGTH}
    assert thread.loop.snapshot.running_count == 0


def test_an_abort_takes_effect_between_two_prefill_chunks() -> None:
    """A long prompt is left after the chunk in flight, and its slot is freed before the next step."""
    plans: list[StepPlan] = []
    holder: list[Thread] = []

    def before_step(plan: StepPlan) -> None:
        plans.append(plan)
        if len(plans) == 2:
            holder[0].abort("a", error=ClientDisconnectedError("gone"))

    engine = FakeEngine(before_step=before_step)
    with running_thread(engine) as thread:
        holder.append(thread)
        thread.submit(request_of("a", prompt_tokens=40 * CHUNK_TOKENS))
        end = thread.published.ends()["a"]
        thread.submit(request_of("b", prompt_tokens=1, max_tokens=1))
        thread.published.ends(2)

    assert (end.reason, end.completion_tokens) == (FinishReason.ABORT, 0)
    assert isinstance(end.error, ClientDisconnectedError)
    chunks = [len(plan.prefill[0].token_ids) for plan in plans if plan.prefill]
    assert chunks == [CHUNK_TOKENS, CHUNK_TOKENS, 1]
    assert engine.memory().kv_used_bytes == 0


def test_a_message_wakes_an_idle_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request on an idle daemon does not wait for the idle heartbeat."""
    monkeypatch.setattr("machd.engine_process.loop._IDLE_WAIT_S", _NEVER_S)
    with running_thread() as thread:
        thread.loop.loaded.result(CEILING_S)
        for number in range(5):
            thread.submit(request_of(f"s{number}", max_tokens=1))
            thread.published.ends(number + 1)


# Faults


def test_a_row_fault_ends_one_request_and_no_other(logged: list[EventDict]) -> None:
    """The next request on the same engine is answered in full, and the cause is in the log."""
    planted = ValueError("planted")
    faults = FakeFaults(row_errors={(0, 1): planted})
    with running_thread(FakeEngine(faults=faults)) as thread:
        thread.submit(request_of("bad", max_tokens=5))
        bad = thread.published.ends()["bad"]
        faults.row_errors.clear()
        thread.submit(request_of("good", max_tokens=5))
        good = thread.published.ends(2)["good"]
        assert thread.loop.is_alive

    assert isinstance(bad.error, RowFaultError)
    assert (good.reason, good.completion_tokens) == (FinishReason.LENGTH, 5)
    assert not thread.published.of(EngineFaulted)
    assert [(one["event"], one["exc_info"]) for one in logged] == [("row.failed", planted)]


def test_an_engine_fault_costs_no_request_its_answer() -> None:
    """Running requests are resumed; waiting and later ones are served as usual."""
    steps = 0

    def before_step(_plan: StepPlan) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise RuntimeError("planted")

    with running_thread(FakeEngine(before_step=before_step)) as thread:
        thread.submit(request_of("hit", max_tokens=9), request_of("waiting"))
        ends = thread.published.ends(2)
        thread.submit(request_of("next"))
        ends = thread.published.ends(3)
        assert thread.loop.is_alive

    assert {one.reason for one in ends.values()} == {FinishReason.LENGTH}
    assert [one.sequence_id for one in thread.published.of(SequenceResumed)] == ["hit"]
    assert len(thread.published.of(EngineFaulted)) == 1
    assert thread.fault() is None


def test_a_request_that_makes_the_engine_fail_twice_is_ended() -> None:
    """It gets its error; waiting and later ones are served as ever."""

    def before_step(plan: StepPlan) -> None:
        if plan.prefill and len(plan.prefill[0].token_ids) == 1:
            raise RuntimeError("planted")

    with running_thread(FakeEngine(before_step=before_step)) as thread:
        thread.submit(request_of("bad", prompt_tokens=1), request_of("waiting"))
        ends = thread.published.ends(2)
        thread.submit(request_of("next"))
        ends = thread.published.ends(3)
        assert thread.loop.is_alive

    assert isinstance(ends["bad"].error, EngineFaultError)
    assert ends["waiting"].reason is ends["next"].reason is FinishReason.LENGTH
    assert len(thread.published.of(EngineFaulted)) == 2


def test_an_engine_that_fails_six_times_in_a_row_is_given_up(logged: list[EventDict]) -> None:
    """The thread ends with its fault, and running and waiting requests are answered."""
    planted = RuntimeError("planted")

    def before_step(_plan: StepPlan) -> None:
        raise planted

    with running_thread(FakeEngine(before_step=before_step)) as thread:
        thread.submit(*(request_of(f"s{number}") for number in range(5)))
        ends = thread.published.ends(5)
        fault = thread.fault()

        assert isinstance(fault, EngineFaultError)
        assert fault.__cause__ is planted
        assert thread.loop.join(CEILING_S)

    assert list(ends) == [f"s{number}" for number in range(5)]
    assert {type(end.error) for end in ends.values()} == {EngineFaultError}
    assert len(thread.published.of(EngineFaulted)) == 6
    assert not thread.published.of(OutputGenerated)
    assert [(one["event"], one["log_level"]) for one in logged] == [
        *[("engine.step_failed", "error")] * 6,
        ("engine.stopped", "critical"),
    ]


def test_a_good_step_forgives_the_faults_before_it() -> None:
    """Only faults in a row count: an engine that recovers is kept."""
    # A request to which the engine is not equal fails twice.
    failing = [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13]
    steps = dict.fromkeys(failing, RuntimeError("planted"))
    with running_thread(FakeEngine(faults=FakeFaults(step_errors={**steps}))) as thread:
        for number in range(9):
            thread.submit(request_of(f"s{number}", max_tokens=1))
        ends = thread.published.ends(9)
        assert thread.loop.is_alive

    failed = [sequence_id for sequence_id, end in ends.items() if end.error is not None]
    assert failed == ["s0", "s1", "s3", "s4", "s6", "s7"]


def test_an_answer_that_its_reader_ends_forgives_faults_too() -> None:
    """A stop text ends an answer by an abort without an error, and shows a working engine."""

    def before_step(plan: StepPlan) -> None:
        if plan.prefill and len(plan.prefill[0].token_ids) == 1:
            raise RuntimeError("planted")

    with running_thread(FakeEngine(before_step=before_step)) as thread:
        for number, prompt_tokens in enumerate([1, 1, 2, 1, 1]):
            thread.submit(request_of(f"s{number}", prompt_tokens=prompt_tokens, max_tokens=4000))
            if prompt_tokens > 1:
                thread.published.wait_for(OutputGenerated)
                thread.abort(f"s{number}")
            thread.published.ends(number + 1)
        assert len(thread.published.of(EngineFaulted)) == 8
        assert thread.loop.is_alive


def test_a_reset_that_fails_ends_the_thread() -> None:
    """An engine that cannot be started afresh is not used again."""
    reset_error = OSError("planted in reset")
    faults = FakeFaults(step_errors={0: RuntimeError("planted")}, reset_error=reset_error)
    with running_thread(FakeEngine(faults=faults)) as thread:
        thread.submit(request_of("running"), request_of("waiting"))
        ends = thread.published.ends(2)
        assert thread.fault() is reset_error
        assert thread.loop.join(CEILING_S)

    assert {type(end.error) for end in ends.values()} == {EngineFaultError}


class _Contradiction(Scheduler):
    """Its books never add up."""

    def check_invariants(self, *, is_whole: bool = True) -> None:
        """Raise."""
        del is_whole
        raise AssertionError("planted")


class _LeakyEngine(FakeEngine):
    """Frees no row."""

    def memory(self) -> MemoryReading:
        """Something is always left once a step has run."""
        return MemoryReading(7 if self._step else 0, 0, 0, 0)


def test_a_broken_invariant_ends_the_thread_where_it_is_strict() -> None:
    """A scheduler that contradicts itself is a bug, and a test may not run on."""
    with running_thread(
        make_scheduler=lambda _engine: _Contradiction(single_flight(LIMITS))
    ) as thread:
        thread.submit(request_of("a", max_tokens=1))
        fault = thread.fault()
        assert isinstance(fault, AssertionError)
        assert thread.loop.join(CEILING_S)


class _KeepsEverySlot(OpenSequences):
    def _retire(self, sequence: Sequence, *, is_sound: bool) -> None:
        del sequence, is_sound


class _ForgetsASlot(Scheduler):
    """The sequence has no subscriber any more, and goes on."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.__class__ = _KeepsEverySlot


def test_books_are_looked_through_while_steps_run() -> None:
    """A slot that is never given back keeps the thread from ever being idle."""
    clock, gate = ManualClock(), StepGate(at_decode)

    def before_step(plan: StepPlan) -> None:
        gate(plan)
        clock.advance(1.0)

    forgetful = running_thread(
        FakeEngine(before_step=before_step),
        make_scheduler=lambda _engine: _ForgetsASlot(single_flight(LIMITS)),
        clock=clock,
        gate=gate,
    )
    with forgetful as thread:
        thread.submit(request_of("a", max_tokens=90, arrived_s=clock.monotonic_s()))
        gate.wait_until_held()
        thread.abort("a")
        gate.open()
        assert isinstance(thread.fault(), AssertionError)
        assert thread.loop.join(CEILING_S)
    assert gate.step_count < 10, "the books are looked through each second, not at the end"


def test_a_broken_invariant_is_told_and_served_around(logged: list[EventDict]) -> None:
    """Outside tests it is an event and a line in the log, each idle moment, and answers go on."""
    with running_thread(
        make_scheduler=lambda _engine: _Contradiction(single_flight(LIMITS)),
        strict_invariants=False,
    ) as thread:
        for number in range(2):
            thread.submit(request_of(f"s{number}", max_tokens=1))
            thread.published.wait_for(InvariantBroken, number + 1)
        assert thread.loop.is_alive
        assert len(thread.published.ends(2)) == 2

    assert thread.published.of(InvariantBroken) == [InvariantBroken("planted")] * 2
    assert [(one["event"], one["log_level"]) for one in logged] == [
        ("scheduler.invariant_broken", "error")
    ] * 2


def test_kv_that_is_left_over_is_a_broken_invariant() -> None:
    """When nothing runs, the engine's own count of KV bytes is 0."""
    with running_thread(_LeakyEngine(), strict_invariants=False) as thread:
        thread.submit(request_of("a", max_tokens=1))
        (broken,) = thread.published.wait_for(InvariantBroken)
    assert "7 bytes" in broken.detail


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_never_ends_in_silence() -> None:
    """Even if ending the sequences fails too, ``finished`` resolves with the fault."""
    with running_thread(
        make_scheduler=lambda _engine: _BrokenScheduler(single_flight(LIMITS))
    ) as thread:
        thread.submit(request_of("a"))
        assert thread.loop.join(CEILING_S)
        assert thread.loop.finished.done(), "nobody learns that the engine is dead"
        assert isinstance(thread.loop.finished.exception(0), AssertionError)


# Waiting


def test_an_idle_thread_waits_for_company_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request's window ends by itself: no message has to come to start it."""
    monkeypatch.setattr("machd.engine_process.loop._IDLE_WAIT_S", _NEVER_S)
    clock, looks = ManualClock(), 0

    class _Counting(Scheduler):
        def admit(self, now_s: float) -> list[Event]:
            nonlocal looks
            looks += 1
            return super().admit(now_s)

    batching = batching_of(window_s=0.05)
    with running_thread(
        make_scheduler=lambda _engine: _Counting(continuous(LIMITS, batching)), clock=clock
    ) as thread:
        thread.submit(request_of("a", max_tokens=1, arrived_s=clock.monotonic_s()))
        wait_until(lambda: looks >= 3, "the thread comes back to look")
        assert not thread.published.of(SequenceAdmitted)
        clock.advance(0.05)
        thread.published.ends()


def test_a_thread_that_waits_does_not_spin() -> None:
    """While a window is open the thread sleeps: it looks at the scheduler a few times, no more."""
    looks = 0

    class _Counting(Scheduler):
        def admit(self, now_s: float) -> list[Event]:
            nonlocal looks
            looks += 1
            return super().admit(now_s)

    clock = SystemClock()
    batching = batching_of(window_s=0.2)
    with running_thread(
        make_scheduler=lambda _engine: _Counting(continuous(LIMITS, batching)), clock=clock
    ) as thread:
        thread.submit(request_of("a", max_tokens=1, arrived_s=clock.monotonic_s()))
        thread.published.wait_for(SequenceAdmitted)
        assert looks < 20


def test_rows_of_a_batch_decode_in_one_step() -> None:
    """Requests that come together run together, and the snapshot tells what they were promised."""
    gate = StepGate(at_decode)
    batching = batching_of(max_b=2, window_s=60.0)
    with running_thread(
        FakeEngine(before_step=gate),
        make_scheduler=lambda _engine: Scheduler(continuous(LIMITS, batching)),
        gate=gate,
    ) as thread:
        thread.submit(request_of("a"), request_of("b", max_tokens=8))
        plan = gate.wait_until_held()
        snapshot = thread.loop.snapshot
        assert len(plan.decode) == 2
        assert (snapshot.active_loops, snapshot.slot_count) == (2, 2)
        assert snapshot.kv_budget_bytes == batching.kv.budget_bytes
        assert snapshot.kv_reserved_bytes == 2 * 12 * 10
        gate.open()
        thread.published.ends(2)
        wait_until(lambda: thread.loop.snapshot.kv_reserved_bytes == 0, "what was promised is back")


# Stopping


def test_a_stop_ends_everything_with_its_error() -> None:
    """Running and waiting requests get the given error, and the thread ends without a fault."""
    gate = StepGate(at_decode)
    error = DrainDeadlineError("time is up")
    with running_thread(FakeEngine(before_step=gate), gate=gate) as thread:
        thread.submit(request_of("running", max_tokens=9), request_of("waiting"))
        gate.wait_until_held()
        thread.loop.stop(error)
        gate.open()
        ends = thread.published.ends(2)
        assert thread.fault() is None
        assert thread.loop.join(CEILING_S)

    assert {name: end.error for name, end in ends.items()} == {"running": error, "waiting": error}
    assert ends["running"].completion_tokens == 2
    assert ends["waiting"].completion_tokens == 0


def test_a_stop_wakes_an_idle_thread_and_closes_the_engine() -> None:
    """Weights and caches are given back by the thread that owns them."""
    closed_on: list[str] = []

    class _Closing(FakeEngine):
        def close(self) -> None:
            closed_on.append(threading.current_thread().name)

    with running_thread(_Closing()) as thread:
        thread.loop.loaded.result(CEILING_S)
        thread.loop.stop(STOPPED)
        assert thread.loop.join(CEILING_S)
        assert thread.fault() is None

    assert closed_on == ["machd-engine"]


def test_an_idle_engine_that_is_lost_when_it_stops_is_a_fault() -> None:
    """The last look at the engine tells a failure that no request met."""

    class _Lost(BaseException):
        pass

    class _LostEngine(FakeEngine):
        is_lost = False

        def memory(self) -> MemoryReading:
            if self.is_lost:
                raise _Lost
            return super().memory()

    engine = _LostEngine()
    with running_thread(engine) as thread:
        thread.loop.loaded.result(CEILING_S)
        engine.is_lost = True
        thread.loop.stop(STOPPED)
        assert isinstance(thread.fault(), _Lost)


def test_what_was_submitted_before_a_stop_is_answered() -> None:
    """A request in the same batch of messages as the stop ends with the stop's error."""
    gate = StepGate()
    with running_thread(FakeEngine(before_step=gate), gate=gate) as thread:
        thread.submit(request_of("running"))
        gate.wait_until_held()
        thread.submit(request_of("late"))
        thread.loop.stop(STOPPED)
        gate.open()
        assert thread.published.ends(2)["late"].error is STOPPED


# The pulse


def test_the_heartbeat_stays_fresh_while_idle() -> None:
    """However far time moves, an idle thread beats again by itself."""
    clock = ManualClock()
    with running_thread(clock=clock) as thread:
        thread.loop.loaded.result(CEILING_S)
        for _ in range(2):
            clock.advance(1000)
            wait_until(lambda: thread.loop.heartbeat_age_s < 1, "a heartbeat of the idle thread")


def test_the_heartbeat_goes_stale_while_a_step_hangs() -> None:
    """A thread that is stuck in the engine looks stuck, and looks well again when it is not."""
    clock, gate = ManualClock(), StepGate()
    with running_thread(FakeEngine(before_step=gate), clock=clock, gate=gate) as thread:
        thread.submit(request_of(arrived_s=clock.monotonic_s()))
        gate.wait_until_held()
        clock.advance(50)
        assert thread.loop.heartbeat_age_s == 50
        gate.open()
        wait_until(lambda: thread.loop.heartbeat_age_s == 0, "a heartbeat after the step")


def test_the_snapshot_follows_the_work() -> None:
    """Counts are those of the last pass: one runs, the others wait, and nothing is left at the end."""
    gate = StepGate(at_decode)
    with running_thread(FakeEngine(before_step=gate), gate=gate) as thread:
        thread.submit(*(request_of(one) for one in "abc"))
        gate.wait_until_held()
        snapshot = thread.loop.snapshot
        assert (snapshot.running_count, snapshot.waiting_count) == (1, 2)
        assert snapshot.active_loops == 1
        gate.open()
        thread.published.ends(3)
        wait_until(lambda: thread.loop.snapshot.running_count == 0, "an idle snapshot")
        assert thread.loop.snapshot.waiting_count == 0


def test_the_idle_snapshot_is_not_touched_while_a_generation_runs() -> None:
    """It stays the moment before the work, step after step, and is renewed once the work is done."""
    clock, gate = ManualClock(), StepGate(at_decode)
    engine = FakeEngine(before_step=gate)
    with running_thread(engine, clock=clock, gate=gate) as thread:
        thread.loop.loaded.result(CEILING_S)
        before = thread.loop.idle_snapshot
        for _ in range(5):
            clock.advance(2)  # a memory reading is due in each step
            thread.submit(request_of(f"s{gate.step_count}", arrived_s=clock.monotonic_s()))
            gate.wait_until_held()
            during = thread.loop.idle_snapshot
            assert (during.running_count, during.memory) == (0, before.memory)
            assert during.taken_unix_s <= clock.unix_s() - 2
            gate.let()
        assert thread.loop.snapshot.memory.kv_used_bytes > 0
        gate.open()
        wait_until(
            lambda: thread.loop.idle_snapshot.taken_unix_s == clock.unix_s(), "a new idle moment"
        )
        assert thread.loop.idle_snapshot.memory.kv_used_bytes == 0


def test_an_engine_whose_every_decode_fails_is_given_up() -> None:
    """A prefill that works proves nothing: without one whole answer, six faults are the end."""

    def before_step(plan: StepPlan) -> None:
        if plan.decode:
            raise RuntimeError("planted")

    with running_thread(FakeEngine(before_step=before_step)) as thread:
        thread.submit(*(request_of(f"s{number}", max_tokens=50) for number in range(5)))
        ends = thread.published.ends(5)
        assert isinstance(thread.fault(), EngineFaultError)
        assert thread.loop.join(CEILING_S)

    assert {type(end.error) for end in ends.values()} == {EngineFaultError}
    assert len(thread.published.of(EngineFaulted)) == 6
