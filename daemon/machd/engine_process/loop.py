"""The engine thread: it loads the model, runs every step, and publishes the events.

Only this thread calls the engine, so no lock guards it. Other threads put messages into the inbox and read
frozen snapshots; liveness is judged by the thread's heartbeat.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

import structlog

from machd.clock import Clock
from machd.engine.protocol.encoder import EncoderInput
from machd.engine.protocol.engine import Engine, ModelFront
from machd.engine.protocol.media import PlainArray
from machd.engine_process.config_change import ConfigChange
from machd.engine_process.inbox import (
    Abort,
    ChangeConfig,
    ClearPrefixes,
    Inbox,
    OpenChanges,
    SetLimits,
    Stop,
    Submit,
)
from machd.engine_process.invariant_checks import InvariantChecks
from machd.engine_process.loop_snapshot import Pulse, Snapshots
from machd.engine_process.measured_engine import Interruption, MeasuredEngine
from machd.engine_process.scheduling import Scheduling
from machd.engine_process.startup_guard import NothingToMeasure, Probe, ProbeNews
from machd.engine_process.steps import Steps
from machd.engine_process.unadopted_results import UnadoptedResults
from machd.errors import EngineFaultError, MachdError
from machd.link.snapshot import LoopSnapshot
from machd.link.state import ServedState
from machd.scheduler.events import EngineFaulted, Event
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.subscriber import SequenceRequest
from machd.settings.model import Settings

_IDLE_WAIT_S = 0.5
"""How long an idle thread sleeps between heartbeats."""


class EngineLoop:
    """Owner of the engine, the scheduler and the thread they live on.

    Attributes:
        loaded: Resolves once the model is served, or with the error of loading.
        state: State of the loaded model; set before its scheduler is made.
        front: The model's description and tokenizer; set once it is served.
        finished: Resolves when the thread has ended: to None after a stop, else with the fault.
    """

    def __init__(  # noqa: PLR0913 - one argument for each thing that it calls
        self,
        *,
        load: Callable[[], Engine],
        scheduling: Scheduling,
        settings: Settings,
        publish: Callable[[list[Event]], None],
        clock: Clock,
        probe: Probe | None = None,
        on_verdicts: Callable[[frozenset[str]], None] = lambda _changed: None,
        on_note: Callable[[LoopSnapshot], None] = lambda _snapshot: None,
        on_beat: Callable[[float], None] = lambda _allowed_s: None,
        strict_invariants: bool = False,
    ) -> None:
        """Prepare the thread; :meth:`start` runs it.

        Args:
            load: Makes the engine; called on the engine thread.
            scheduling: Makes the scheduler and its configs.
            settings: Settings in force until they are changed.
            publish: Called with the events of a step, on the engine thread.
            clock: Reads time.
            probe: Measures the loaded engine before a scheduler is made for it, and later when
                the admin API asks for it; None to measure nothing.
            on_verdicts: Called on the engine thread with the features whose verdicts have changed.
            on_note: Called on the engine thread with new counts, before the events of the same step are published.
            on_beat: Called on the engine thread at each heartbeat with the extra time until the next one.
            strict_invariants: Whether a broken invariant ends the thread, as in tests, or is logged and counted
                while requests go on.
        """
        self.loaded: Future[None] = Future()
        self.state: ServedState | None = None
        self.front: ModelFront | None = None
        self.finished: Future[None] = Future()
        self.inbox = Inbox()
        self._load = load
        self._scheduling = scheduling
        self._settings = settings
        self._publish = publish
        self._clock = clock
        self._probe = probe or NothingToMeasure()
        self._on_verdicts = on_verdicts
        self._news = UnadoptedResults(ProbeNews(self._probe, clock))
        self._log = structlog.get_logger("machd.engine")
        self._on_note = on_note
        self._pulse = Pulse(clock, on_beat)
        self._steps = Steps(publish, self._pulse, clock)
        self._checks = InvariantChecks(publish, clock, is_strict=strict_invariants)
        self._config_change = ConfigChange(
            scheduling, lambda: self._known, self._measure_again, clock
        )
        self._end_error: MachdError = EngineFaultError(
            "the engine has stopped; the server is restarting"
        )
        self._snapshots = Snapshots(clock)
        self._changes = OpenChanges()
        self._stop: Stop | None = None
        self._thread = threading.Thread(target=self._main, name="machd-engine", daemon=True)

    @property
    def _known(self) -> ServedState:
        assert self.state is not None, "the model is loaded"
        return self.state

    @property
    def snapshot(self) -> LoopSnapshot:
        """The newest counts; memory at most a second old."""
        return self._snapshots.newest

    def submit(self, requests: tuple[SequenceRequest, ...]) -> None:
        """Start the sequences of one request."""
        self.inbox.put(Submit(requests))

    def abort(self, sequence_ids: tuple[str, ...], error: MachdError | None) -> None:
        """Abort sequences; ``error`` is None if their client needs no more tokens."""
        self.inbox.put(Abort(sequence_ids, error))

    @property
    def idle_snapshot(self) -> LoopSnapshot:
        """The counts at the last idle moment."""
        return self._snapshots.idle

    @property
    def pid(self) -> int:
        """Number of this process."""
        return os.getpid()

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the thread last began a step or was idle.

        While the model is measured anew, they count from the measurement's time limit.
        """
        return self._pulse.age_s

    @property
    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Run the thread."""
        self._thread.start()

    def encode(
        self,
        inputs: tuple[EncoderInput, ...],  # noqa: ARG002 - the port's
        *,
        is_suspect: bool = False,  # noqa: ARG002
    ) -> Future[PlainArray]:
        """Raise: a model that generates has no vectors, and its front knows that."""
        raise AssertionError("texts are encoded by an encoder")

    def drop_inputs(self, inputs: tuple[EncoderInput, ...]) -> None:
        """Do nothing: there are none."""

    def change_config(self, settings: Settings, *, measure: bool = False) -> Future[None]:
        """Change the scheduler config after the running step; see :meth:`machd.link.port.EnginePort.change_config`."""
        request = ChangeConfig(settings, is_measured=measure)
        self._changes.add(request)
        self.inbox.put(request)
        return request.done

    @property
    def is_changing_config(self) -> bool:
        """Return whether a requested scheduler config is not in force yet."""
        return not self._changes.is_empty

    def set_limits(self, settings: Settings) -> None:
        """Apply other limits to new, waiting and running requests and to caches, from the next step on."""
        self.inbox.put(SetLimits(settings))

    def clear_prefixes(self, *, is_disk_included: bool) -> Future[int]:
        """Drop the unused blocks of the prefix cache; resolves to their number.

        Never resolves if the thread ends before.
        """
        request = ClearPrefixes(is_disk_included)
        self.inbox.put(request)
        return request.done

    def place(self, settings: Settings) -> None:
        """Have a model that is being loaded scheduled by these settings."""
        self._settings = settings

    def suspend(self) -> None:
        """Return None: a thread cannot be ended, nor its memory given back."""

    def resume(self) -> Future[None]:
        """Return what :meth:`start` has begun: the model was never suspended."""
        return self.loaded

    def kill(self) -> bool:
        """Do nothing: a thread cannot be ended."""
        return False

    def stop(self, error: MachdError) -> None:
        """Tell the thread to end all sequences with ``error`` and then itself.

        A pending change of the scheduler config fails at once: the thread may be measuring, or
        hang.
        """
        self._changes.refuse(error)
        self.inbox.put(Stop(error))

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            engine = self._load()
            self._pulse.beat()
            self.state = ServedState.of(engine.model, self._probe(engine))
            scheduler = self._scheduling.scheduler(engine, self._known, self._settings)
            self._pulse.beat()
            self._note(engine, scheduler, idle=True)
        except BaseException as error:  # noqa: BLE001 - whatever it is, who waits has to learn of it
            self.loaded.set_exception(error)
            self.finished.set_result(None)
            self._changes.refuse(self._end_error)
            return
        self.front = engine
        self.loaded.set_result(None)
        try:
            self._serve(engine, scheduler)
        except BaseException as error:  # noqa: BLE001 - a thread that ends in silence is the one forbidden state
            self._log.critical("engine.stopped", error=type(error).__name__, exc_info=error)
            # First of all, so that the daemon learns of it even if answering fails too.
            self.finished.set_exception(error)
            self._changes.refuse(self._end_error)
            counted = () if isinstance(error, EngineFaultError) else (EngineFaulted(),)
            now_s = self._clock.monotonic_s()
            ended = scheduler.fail(self._end_error, now_s, include_waiting=True)
            self._publish([*counted, *ended])
        else:
            self.finished.set_result(None)
            self._changes.refuse(self._end_error)
        finally:
            engine.close()

    def _serve(self, engine: Engine, scheduler: Scheduler) -> None:
        """Step until told to stop. Raises when the engine cannot be recovered."""
        wait_s, was_idle = 0.0, True
        while True:
            self._pulse.beat()
            events = self._take_messages(engine, scheduler, wait_s=wait_s)
            self._steps.note_answers(events)
            if not self._stop and self._config_change.is_pending:
                events = self._make_way(engine, scheduler, events)
            if self._stop:
                self._steps.finish_blocks(engine, scheduler)
                self._end_error = self._stop.error
                self._publish(
                    events + scheduler.end_all(self._stop.error, self._clock.monotonic_s())
                )
                self._steps.store_rows(engine, scheduler)
                # A last check: an engine that lost one of its ranks has failed, even if it was idle.
                self._note(engine, scheduler, idle=True)
                return
            events += scheduler.admit(self._clock.monotonic_s())
            if events:
                self._note(engine, scheduler, idle=False)
                self._publish(events)
            plan = scheduler.plan()
            events = [] if plan.is_empty else self._steps.run(engine, scheduler, plan)
            is_idle = plan.is_empty and not scheduler.running_count + scheduler.waiting_count
            self._note(engine, scheduler, idle=is_idle)
            if events:
                self._publish(events)
            if is_idle and not was_idle:
                self._checks.check(scheduler, self.snapshot.memory, idle=True)
            elif not is_idle and self._checks.is_due:
                self._checks.check(scheduler, self.snapshot.memory, idle=False)
            was_idle = is_idle
            self._take_news(engine, scheduler)
            wait_s = self._rest_s(scheduler) if plan.is_empty else 0.0

    def _make_way(self, engine: Engine, scheduler: Scheduler, events: list[Event]) -> list[Event]:
        """Suspend running sequences for another config, and apply it once they have no rows; return the remaining events."""
        scheduler.suspend(self._config_change.wanted())
        if not scheduler.is_at_rest:
            return events
        self._publish(events)
        self._change_config(engine, scheduler)
        return []

    def _change_config(self, engine: Engine, scheduler: Scheduler) -> None:
        """Apply the requested scheduler config; its futures resolve when the snapshot shows it.

        A stop that comes meanwhile is left for the caller to see.
        """
        self._note(engine, scheduler, idle=False)  # measuring may take long
        try:
            events = self._config_change.make(engine, scheduler)
        except Interruption as interruption:
            if interruption.__cause__ is not None:
                raise interruption.__cause__ from None
            return
        self._note(engine, scheduler, idle=True)
        self._checks.check(scheduler, self.snapshot.memory, idle=True)
        self._publish(events)
        self._config_change.answer()

    def _measure_again(self, engine: Engine, scheduler: Scheduler) -> None:
        measured = MeasuredEngine(engine, lambda: self._between_steps(engine, scheduler))
        with self._pulse.measurement():
            results = self._probe.remeasure(measured)
            self._news.forget()
        self.state = ServedState.of(engine.model, results)

    def _between_steps(self, engine: Engine, scheduler: Scheduler) -> None:
        """Handle messages between two steps of a measurement.

        Waiting requests see what they would see beside another request's long answer: they queue, may
        be aborted, and are rejected when they time out. So the daemon accepts work while it measures.

        Raises:
            Interruption: The thread is to end.
        """
        events = self._take_messages(engine, scheduler, wait_s=0.0)
        # No sequence is admitted: admission is held until the change is made.
        events += scheduler.admit(self._clock.monotonic_s())
        self._note(engine, scheduler, idle=False)
        if events:
            self._publish(events)
        if self._stop:
            raise Interruption

    def _take_news(self, engine: Engine, scheduler: Scheduler) -> None:
        """Apply results that were measured beside the daemon, if they change a verdict."""
        if self._config_change.is_pending:
            self._news.poll(engine, self._known)
            return
        before = self._known
        after = self._news.due_state(engine, scheduler, before)
        if after is None:
            return
        self.state = after
        if after.verdicts != before.verdicts:
            now_s = self._clock.monotonic_s()
            events = self._scheduling.adopt(engine, scheduler, after, self._settings, now_s)
            self._on_verdicts(after.verdicts.changed_since(before.verdicts))
            self._publish(events)
            self._note(engine, scheduler, idle=True)
        scheduler.resume_admission()

    def _rest_s(self, scheduler: Scheduler) -> float:
        """Return how long to sleep when no step can run; a message wakes the thread sooner."""
        if self._config_change.is_pending:
            return 0.0  # nothing runs, so the change can be applied
        due_s = scheduler.wait_s(self._clock.monotonic_s())
        return _IDLE_WAIT_S if due_s is None else min(due_s, _IDLE_WAIT_S)

    def _take_messages(self, engine: Engine, scheduler: Scheduler, *, wait_s: float) -> list[Event]:
        events: list[Event] = []
        messages = self.inbox.drain(wait_s=wait_s)
        if self._config_change.take(messages, scheduler):
            self._note(engine, scheduler, idle=False)
            self._config_change.answer()
        for message in messages:
            now_s = self._clock.monotonic_s()
            match message:
                case Submit(requests):
                    events += scheduler.submit(requests, now_s)
                case Abort(sequence_ids, error):
                    events += scheduler.abort(sequence_ids, error, now_s)
                case Stop():
                    self._stop = message
                case ClearPrefixes(is_disk_included, done):
                    done.set_result(scheduler.clear_prefixes(is_disk_included=is_disk_included))
                case ChangeConfig(settings) | SetLimits(settings):
                    self._settings = settings
                    limits = self._scheduling.prefix_limits(self._known, settings)
                    scheduler.set_prefix_limits(limits)
        return events

    def _note(self, engine: Engine, scheduler: Scheduler, *, idle: bool) -> None:
        is_changing_config = self._config_change.is_pending
        self._snapshots.take(engine, scheduler, idle=idle, is_changing_config=is_changing_config)
        self._on_note(self._snapshots.newest)
