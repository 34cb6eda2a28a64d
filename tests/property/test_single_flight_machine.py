"""Any history of submits, aborts, steps, faults and waiting keeps the single-flight scheduler right.

A Hypothesis state machine plays the serving loop on a scripted engine and keeps a plain record of
every sequence; the record says what the scheduler may emit. Schedulers that are broken on purpose
prove that the machine would notice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs
from support.clocks.manual_clock import ManualClock
from support.engines.fake_engine import FakeEngine, FakeFaults, lettered

from machd.engine.protocol.step import SampledToken, StepPlan, StepResult
from machd.errors import (
    ClientDisconnectedError,
    EngineFaultError,
    MachdError,
    QueueFullError,
    QueueTimeoutError,
    RequestTimeoutError,
    RowFaultError,
)
from machd.request.generation import SamplingParams
from machd.scheduler.config import SchedulerConfig, single_flight
from machd.scheduler.events import (
    DecodeMode,
    Event,
    FinishReason,
    OutputGenerated,
    SequenceAdmitted,
    SequenceFinished,
    SequenceQueued,
    SequenceStarted,
)
from machd.scheduler.open_sequences import OpenSequences
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.sequence import Sequence
from machd.scheduler.slots import Slots
from machd.scheduler.subscriber import SequenceRequest
from machd.scheduler.waiting import QueueLimits, WaitingQueue

LIMITS = QueueLimits(max_queue=4, max_queue_tokens=30, queue_timeout_s=10.0, request_timeout_s=25.0)
CHUNK_TOKENS = 4
STOP_TOKENS = frozenset(b"aeiou")
"""The scripted engine says letters, so a vowel ends about one token in five."""


@dataclass
class Record:
    """The machine's record of one sequence."""

    request: SequenceRequest
    is_queued: bool = False
    is_admitted: bool = False
    is_started: bool = False
    tokens: list[int] = field(default_factory=list)
    finished: SequenceFinished | None = None

    @property
    def is_waiting(self) -> bool:
        """Accepted, and neither seated nor ended."""
        return self.is_queued and not self.is_admitted and self.finished is None

    @property
    def is_running(self) -> bool:
        """Seated and not ended."""
        return self.is_admitted and self.finished is None


class SingleFlightMachine(RuleBasedStateMachine):
    """The serving loop's verbs in any order."""

    scheduler_class: ClassVar[type[Scheduler]] = Scheduler

    def __init__(self) -> None:
        """Start idle."""
        super().__init__()
        self.clock = ManualClock()
        self.faults = FakeFaults()
        self.step_error: Exception | None = None
        self.engine = FakeEngine(faults=self.faults, before_step=self._before_step)
        self.scheduler = self.scheduler_class(
            single_flight(LIMITS, prefill_chunk_tokens=CHUNK_TOKENS)
        )
        self.records: dict[str, Record] = {}

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 11), st.integers(0, 6)), min_size=1, max_size=3),
        waited_s=st.sampled_from([0.0, 0.0, 4.0]),
    )
    def submit(self, sizes: list[tuple[int, int]], waited_s: float) -> None:
        """A request of one to three sequences: all of them queue, or all of them end."""
        requests = tuple(
            SequenceRequest(
                sequence_id=f"s{len(self.records) + index}",
                group_id=f"g{len(self.records)}",
                prompt=tuple(range(index, index + prompt_tokens)),
                sampling=SamplingParams(temperature=1.0, seed=len(self.records) + index),
                max_tokens=max_tokens,
                stop_token_ids=STOP_TOKENS,
                arrived_s=self.clock.monotonic_s() - waited_s,
            )
            for index, (prompt_tokens, max_tokens) in enumerate(sizes)
        )
        self.records |= {request.sequence_id: Record(request) for request in requests}
        has_room = self._has_room(requests)
        self._note(self.scheduler.submit(requests, self.clock.monotonic_s()))
        outcomes = [self.records[request.sequence_id] for request in requests]
        assert [one.is_queued for one in outcomes] == [has_room] * len(requests)
        for one in outcomes:
            assert one.is_queued != isinstance(_error(one), QueueFullError), "told exactly once"

    @rule(ages=st.lists(st.integers(0, 6), max_size=4), is_gone=st.booleans())
    def abort(self, ages: list[int], *, is_gone: bool) -> None:
        """Any ids, counted back from the newest: unknown (0), waiting, running, finished, twice."""
        sequence_ids = tuple(f"s{len(self.records) - age}" for age in ages)
        error = ClientDisconnectedError("gone") if is_gone else None
        open_before = {
            one
            for one in sequence_ids
            if one in self.records and self.records[one].finished is None
        }
        events = self.scheduler.abort(sequence_ids, error, self.clock.monotonic_s())
        self._note(events)
        finished = [one for one in events if isinstance(one, SequenceFinished)]
        assert len(events) == len(finished) == len(open_before)
        assert {one.sequence_id for one in finished} == open_before
        assert all(one.reason is FinishReason.ABORT and one.error is error for one in finished)

    @rule()
    def step(self) -> None:
        """A step that goes well."""
        self._step()

    @rule(steps=st.integers(2, 8))
    def run_on(self, steps: int) -> None:
        """Some steps in a row, so that sequences come to their own ends."""
        for _ in range(steps):
            self._step()

    @rule()
    def step_with_row_fault(self) -> None:
        """Whichever token would come in this step, its row fails instead."""
        cause = ValueError("planted")
        self.faults.row_errors = {(0, position): cause for position in range(10)}
        running = self._running_after_admission()
        due = running is not None and self._token_is_due(running)
        self._step()
        self.faults.row_errors = {}
        if running is not None and due:
            assert isinstance(_error(running), RowFaultError)

    @rule()
    def step_with_engine_fault(self) -> None:
        """Let the run raise: running sequences end, waiting ones stay, rows are dropped."""
        self.step_error = RuntimeError("planted")
        running = self._running_after_admission()
        waiting = [one for one in self.records.values() if one.is_waiting]
        self._step()
        self.step_error = None
        if running is not None:
            assert isinstance(_error(running), EngineFaultError)
            assert not self.engine._rows
        assert all(one.is_waiting for one in waiting)

    @rule(seconds_s=st.sampled_from([0.5, 3.0, 11.0, 26.0]))
    def wait(self, seconds_s: float) -> None:
        """Time passes, past the timeouts now and then."""
        self.clock.advance(seconds_s)

    @rule()
    def end_all(self) -> None:
        """Stop the daemon: every sequence finishes."""
        error = EngineFaultError("stopped")
        self._note(self.scheduler.fail(error, self.clock.monotonic_s(), include_waiting=True))
        self.engine.reset()
        assert all(one.finished is not None for one in self.records.values())

    @invariant()
    def counts_agree(self) -> None:
        """The scheduler's counts are the record's, and one sequence runs at the most."""
        self.scheduler.check_invariants()
        waiting = [one for one in self.records.values() if one.is_waiting]
        running = [one for one in self.records.values() if one.is_running]
        assert len(running) == self.scheduler.running_count == self.scheduler.active_loops <= 1
        assert len(waiting) == self.scheduler.waiting_count
        assert self.scheduler._waiting.prompt_tokens == sum(
            len(one.request.prompt) for one in waiting
        )

    @invariant()
    def engine_rows_are_the_slots(self) -> None:
        """Every row is of an occupied slot, or of one that the next plan frees."""
        slots = self.scheduler._running.slots
        occupied = {sequence.slot_index for sequence in slots}
        assert set(self.engine._rows) == occupied | set(slots.released)

    def teardown(self) -> None:
        """Left alone, everything ends exactly once and no KV stays behind."""
        for _ in range(1000):
            if self.scheduler.plan().is_empty and not self.scheduler.waiting_count:
                break
            self._step()
        assert all(one.finished is not None for one in self.records.values())
        assert self.engine.memory().kv_used_bytes == 0
        assert not self.engine._rows

    def _before_step(self, _plan: StepPlan) -> None:
        if self.step_error is not None:
            raise self.step_error

    def _step(self) -> None:
        """Run one pass of the serving loop."""
        now_s = self.clock.monotonic_s()
        self._note(self.scheduler.admit(now_s))
        self._check_timeouts(now_s)
        plan = self.scheduler.plan()
        assert plan == self.scheduler.plan(), "planning changes nothing"
        try:
            result = self.engine.run(plan)
        except RuntimeError:
            assert plan == self.scheduler.plan(), "a failed run leaves what it was planned from"
            self._note(self.scheduler.fail(EngineFaultError("planted"), now_s))
            self.engine.reset()
            return
        self._note(self.scheduler.commit(plan, result, now_s, duration_s=0.0))

    def _check_timeouts(self, now_s: float) -> None:
        """After admission no sequence is overdue, and none waits beside a free slot."""
        for one in self.records.values():
            age_s = now_s - one.request.arrived_s
            group_id = one.request.group_id
            is_started = any(
                other.is_admitted
                for other in self.records.values()
                if other.request.group_id == group_id
            )
            patience_s = LIMITS.request_timeout_s if is_started else LIMITS.queue_timeout_s
            assert not (one.is_waiting and age_s >= patience_s)
            assert not (one.is_running and age_s >= LIMITS.request_timeout_s)
        assert self.scheduler.running_count or not self.scheduler.waiting_count

    def _running_after_admission(self) -> Record | None:
        """Admit now, as the step would, so that a rule knows which rows its fault meets."""
        self._note(self.scheduler.admit(self.clock.monotonic_s()))
        return next((one for one in self.records.values() if one.is_running), None)

    def _token_is_due(self, running: Record) -> bool:
        """True if the next step yields a token: a decode row, or the prompt's last chunk."""
        plan = self.scheduler.plan()
        assert len(plan.prefill) + len(plan.decode) == 1, f"{running} runs, so it is in the plan"
        return bool(plan.decode) or plan.prefill[0].is_last

    def _has_room(self, requests: tuple[SequenceRequest, ...]) -> bool:
        """The rule of the queue, worked out from the record."""
        waiting = [one for one in self.records.values() if one.is_waiting]
        is_free = not any(one.is_running for one in self.records.values())
        queued = len(waiting) + len(requests) - is_free
        tokens = sum(len(one.request.prompt) for one in waiting)
        tokens += sum(len(request.prompt) for request in requests)
        return queued <= LIMITS.max_queue and (queued <= 0 or tokens <= LIMITS.max_queue_tokens)

    def _note(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case SequenceQueued(sequence_id, position):
                    self._note_queued(self.records[sequence_id], position)
                case SequenceAdmitted(sequence_id):
                    self._note_admitted(self.records[sequence_id])
                case SequenceStarted(sequence_id, mode):
                    self._note_started(self.records[sequence_id], mode)
                case OutputGenerated(sequence_id, SampledToken() as token):
                    self._note_token(self.records[sequence_id], token.token_id)
                case SequenceFinished(sequence_id):
                    self._note_finished(self.records[sequence_id], event)
                case _:
                    raise AssertionError(
                        "events of other engines, or of one that drafts or keeps prompts"
                    )

    def _note_queued(self, record: Record, position: int) -> None:
        assert not record.is_queued
        assert record.finished is None
        arrived_s = record.request.arrived_s
        assert position == sum(
            one.is_waiting and one.request.arrived_s <= arrived_s for one in self.records.values()
        )
        record.is_queued = True

    def _note_admitted(self, record: Record) -> None:
        assert record.is_waiting, "admitted once, from the queue"
        waiting = [one for one in self.records.values() if one.is_waiting]
        first = min(waiting, key=lambda one: one.request.arrived_s)
        assert record is first, "first come, first served"
        assert not any(one.is_running for one in self.records.values())
        record.is_admitted = True

    def _note_started(self, record: Record, mode: DecodeMode) -> None:
        assert record.is_running
        assert not record.is_started
        assert not record.tokens
        assert mode is DecodeMode.SINGLE
        record.is_started = True

    def _note_token(self, record: Record, token_id: int) -> None:
        assert record.is_started, "a sequence is told that it starts"
        assert record.is_running, "tokens come to running sequences only, never after the end"
        request = record.request
        assert token_id == lettered(request.prompt, request.sampling, len(record.tokens))
        assert token_id not in STOP_TOKENS
        record.tokens.append(token_id)
        assert len(record.tokens) <= request.max_tokens

    def _note_finished(self, record: Record, event: SequenceFinished) -> None:
        assert record.finished is None, "finished exactly once"
        record.finished = event
        request, generated = record.request, len(record.tokens)
        assert event.prompt_tokens == len(request.prompt)
        stop_tokens = 1 if event.reason is FinishReason.STOP else 0
        assert event.completion_tokens == generated + stop_tokens
        match event.reason:
            case FinishReason.STOP:
                token_id = lettered(request.prompt, request.sampling, generated)
                assert token_id in STOP_TOKENS
                assert event.error is None
            case FinishReason.LENGTH:
                assert generated == request.max_tokens
                assert event.error is None
            case FinishReason.ERROR:
                assert isinstance(
                    event.error,
                    QueueFullError
                    | QueueTimeoutError
                    | RequestTimeoutError
                    | RowFaultError
                    | EngineFaultError,
                )
            case FinishReason.ABORT:
                assert event.error is None or isinstance(event.error, ClientDisconnectedError)


def _error(record: Record) -> MachdError | None:
    return record.finished.error if record.finished is not None else None


TestSingleFlightMachine = SingleFlightMachine.TestCase
TestSingleFlightMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class _ForgetfulSlots(Slots):
    def leave(self, slot_index: int) -> None:
        del self._occupied[slot_index]


class ForgetsToRelease(Scheduler):
    """The engine never learns that a slot was left."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._running.slots = _ForgetfulSlots(1)


class _KeepsFinishedInSlot(OpenSequences):
    def _retire(self, sequence: Sequence, *, is_sound: bool) -> None:
        if not sequence.is_running:
            super()._retire(sequence, is_sound=is_sound)


class KeepsFinishedInSlot(Scheduler):
    """Keeps the slot of a sequence without subscribers."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.__class__ = _KeepsFinishedInSlot


class _LosesWhoIsAbortedWhileWaiting(OpenSequences):
    def abort(
        self, sequence_ids: tuple[str, ...], error: MachdError | None, now_s: float
    ) -> list[Event]:
        for sequence in self.waiting:
            if sequence.request.sequence_id in sequence_ids:
                self.waiting.remove(sequence)
                del self._by_id[sequence.request.sequence_id]
        return super().abort(sequence_ids, error, now_s)


class LosesWhoIsAbortedWhileWaiting(Scheduler):
    """Emits nothing for an abort in the queue."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.__class__ = _LosesWhoIsAbortedWhileWaiting


class _TurnedAround(WaitingQueue):
    def first_but(self, passed: Collection[Sequence]) -> Sequence | None:
        others = [one for one in self if one not in passed]
        return others[-1] if others else None


class LastComeFirstServed(Scheduler):
    """Admits the newest sequence first."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.waiting = _TurnedAround(config.limits)


class DeliversStopTokens(Scheduler):
    """Lets the token that ends a completion into its text."""

    def commit(
        self, plan: StepPlan, result: StepResult, now_s: float, *, duration_s: float
    ) -> list[Event]:
        """Announce every token."""
        events = super().commit(plan, result, now_s, duration_s=duration_s)
        if result.tokens and events and not isinstance(events[0], OutputGenerated):
            ended = events[0]
            assert isinstance(ended, SequenceFinished)
            return [OutputGenerated(ended.sequence_id, result.tokens[0], now_s), *events]
        return events


class CountsOneTokenTooMany(Scheduler):
    """Tells a wrong number at the end."""

    def commit(
        self, plan: StepPlan, result: StepResult, now_s: float, *, duration_s: float
    ) -> list[Event]:
        """Spoil the count."""
        return [
            structs.replace(event, completion_tokens=event.completion_tokens + 1)
            if isinstance(event, SequenceFinished)
            else event
            for event in super().commit(plan, result, now_s, duration_s=duration_s)
        ]


class _NeverTimesOut(OpenSequences):
    def expire(self, now_s: float) -> list[Event]:
        del now_s
        return []


class NeverTimesOut(Scheduler):
    """Expires no sequence."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Start idle."""
        super().__init__(config)
        self._open.__class__ = _NeverTimesOut


class FailsInSilence(Scheduler):
    """Emits nothing after an engine fault."""

    def fail(
        self, error: MachdError, now_s: float, *, include_waiting: bool = False
    ) -> list[Event]:
        """Do it, and say nothing."""
        super().fail(error, now_s, include_waiting=include_waiting)
        return []


class QueuesWithoutBounds(Scheduler):
    """Takes in everything."""

    def _check_room(self, new: tuple[Sequence, ...]) -> None:
        del new


@pytest.mark.parametrize(
    "broken",
    [
        ForgetsToRelease,
        KeepsFinishedInSlot,
        LosesWhoIsAbortedWhileWaiting,
        LastComeFirstServed,
        DeliversStopTokens,
        CountsOneTokenTooMany,
        NeverTimesOut,
        FailsInSilence,
        QueuesWithoutBounds,
    ],
)
def test_the_machine_notices_a_broken_scheduler(broken: type[Scheduler]) -> None:
    """Each way of being wrong breaks an invariant, so a green machine means something."""

    class Broken(SingleFlightMachine):
        scheduler_class = broken

    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            Broken,
            settings=settings(
                max_examples=300,
                stateful_step_count=30,
                deadline=None,
                database=None,
                derandomize=True,
                report_multiple_bugs=False,
                phases=[Phase.generate],
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
