"""The engine of one model in a process of its own, which is replaced when it ends.

Open sequences are kept here with the tokens that have come of them. A new process is told of them, and goes on
where the former one ended. Settings, questions and aborts that were not answered are sent again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import structlog

from machd.clock import Clock
from machd.engine.protocol.engine import GrammarCompiler, ModelDescription, ModelFront
from machd.engine.protocol.progress import LoadProgress
from machd.errors import EngineFaultError, MachdError
from machd.link.messages import (
    Abort,
    Answered,
    Beat,
    BlocksChanged,
    ChangeConfig,
    ClearPrefixes,
    CompileGrammar,
    DropGrammar,
    Ended,
    GrammarCompiled,
    LoadFailed,
    Located,
    Progress,
    Report,
    Served,
    SetLimits,
    Stop,
    Submit,
    ToFront,
)
from machd.link.port import EngineListener, RestartReason
from machd.link.snapshot import LoopSnapshot
from machd.link.started_engine import StartedEngine
from machd.link.state import ServedState
from machd.request.constraint import Constraint
from machd.request.generation import Grammar
from machd.request.intersections import has_unbounded_cost
from machd.request.schema_bounds import check_constraint
from machd.scheduler.events import Event, FinishReason
from machd.scheduler.subscriber import SequenceRequest
from machd.served.engine_process import EngineProcess, describe_status
from machd.served.open_sequences import OpenSequences
from machd.served.questions import Answer, Question, Questions, resolve
from machd.served.restarts import Restarts
from machd.settings.model import Settings

_EXIT_S = 15.0
"""How long a process that has closed its end of the link may take to end."""

_WANTED_INTERVAL_S = 0.1

_T = TypeVar("_T")

OpenFront = Callable[[ModelDescription, GrammarCompiler], ModelFront]
"""Opens the front of the model that an engine process serves; may take a second."""


class SupervisedEngine:
    """The :class:`machd.link.port.EnginePort` of a daemon.

    One thread starts the process, reads what it says and replaces it; ``_lock`` guards what that thread
    shares with those that ask.
    """

    def __init__(  # noqa: PLR0913 - one argument for each thing that it calls
        self,
        settings: Settings,
        listener: EngineListener,
        *,
        start_process: Callable[[Settings], StartedEngine],
        prepare_front: Callable[[Located], OpenFront],
        progress: LoadProgress,
        restarts: Restarts,
        clock: Clock,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            settings: In force until others come.
            listener: Told what happens.
            start_process: Starts an engine process with these settings, or with older ones.
            prepare_front: Begins to open the texts of the model whose files an engine process has found.
            progress: Told how far the first loading is.
            restarts: How often a process may be replaced.
            clock: Reads time.
        """
        self.loaded: Future[None] = Future()
        self.finished: Future[None] = Future()
        self.state: ServedState | None = None
        self.front: ModelFront | None = None
        self.snapshot = LoopSnapshot()
        self.idle_snapshot = LoopSnapshot()
        self._settings = settings
        self._listener = listener
        self._start_process = start_process
        self._prepare_front = prepare_front
        self._progress = progress
        self._clock = clock
        self._log = structlog.get_logger("machd.engine")
        self._lock = threading.Lock()
        self._process: EngineProcess | None = None
        self._serving: EngineProcess | None = None
        self._reason = RestartReason.EXIT
        self._fault: MachdError | None = None
        self._stop_error: MachdError | None = None
        self._stopping = threading.Event()
        self._beat_s = clock.monotonic_s()
        self._allowed_s = 0.0
        self._sequences = OpenSequences()
        self._held: deque[SequenceRequest] = deque()
        self._restarts = restarts
        self._isolated: str | None = None
        self._questions = Questions()
        self._thread = threading.Thread(target=self._main, name="machd-link", daemon=True)

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the process last said something; 0 while none serves."""
        if self._serving is None:
            return 0.0
        return max(0.0, self._clock.monotonic_s() - self._beat_s - self._allowed_s)

    @property
    def is_changing_config(self) -> bool:
        """Whether a requested scheduler config is not in force yet."""
        with self._lock:
            return any(isinstance(one, ChangeConfig) for one in self._questions)

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    def submit(self, requests: tuple[SequenceRequest, ...]) -> None:
        """Start the sequences of one request."""
        with self._lock:
            is_sent = self._serving is not None and self._isolated is None
            if self._serving is not None and is_sent:
                self._serving.send(Submit(requests))  # first: there may be no memory for it
            self._sequences.add(requests)
            if is_sent:
                self._sequences.note_sent(requests)
            elif self._isolated is not None:
                self._held.extend(requests)

    def abort(self, sequence_ids: tuple[str, ...], error: MachdError | None) -> None:
        """End sequences; ``error`` is None if their client simply has enough."""
        with self._lock:
            held_ids = {one.sequence_id for one in self._held}
            sent_ids, unsent_ids = list[str](), list[str]()
            for one in filter(self._sequences.__contains__, sequence_ids):
                is_sent = self._serving is not None and one not in held_ids
                (sent_ids if is_sent else unsent_ids).append(one)
            if self._serving is not None and sent_ids:
                self._serving.send(Abort(tuple(sent_ids), error))
            now_s = self._clock.monotonic_s()
            events = self._sequences.end(unsent_ids, FinishReason.ABORT, error, now_s)
        if events:
            self._listener.publish(events)

    def change_config(self, settings: Settings, *, measure: bool = False) -> Future[None]:
        """Schedule by other settings after the step that runs; see :meth:`machd.link.port.EnginePort.change_config`."""
        with self._lock:
            self._settings = settings
        asked = self._ask(lambda number: ChangeConfig(number, settings, measure))
        return _told(asked, lambda _: None)

    def set_limits(self, settings: Settings) -> None:
        """Hold requests that come, wait or run, and what is kept, against other limits from the next step on."""
        with self._lock:
            self._settings = settings
            if self._serving is not None:
                self._serving.send(SetLimits(settings))

    def clear_prefixes(self, *, is_disk_included: bool) -> Future[int]:
        """Forget the unused blocks of the prefix cache; resolves to their number."""
        asked = self._ask(lambda number: ClearPrefixes(number, is_disk_included))
        return _told(asked, lambda count: count if isinstance(count, int) else 0)

    def kill(self) -> bool:
        """End a process that hangs; another one takes its place unless the engine is told to stop."""
        with self._lock:
            process = self._process
            self._reason = RestartReason.STALL
            self._beat_s = self._clock.monotonic_s()
        if process is not None:
            process.kill()
        return True

    def stop(self, error: MachdError) -> None:
        """Ask the process to end all sequences with ``error``, and itself; one that loads is ended at once."""
        with self._lock:
            if self._stop_error is None:
                self._stop_error = error
            serving, process = self._serving, self._process
            refused = self._questions.take_all(ChangeConfig)
        for future in refused:
            future.set_exception(error)
        self._stopping.set()
        if serving is not None:
            serving.send(Stop(error))
        elif process is not None:
            process.kill()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the last process; returns whether it has come."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def is_separate(self, constraint: Constraint) -> bool:
        """Tell whether compiling a constraint may take seconds; see :class:`GrammarCompiler`."""
        check_constraint(constraint)
        return has_unbounded_cost(constraint)

    def compile(
        self, constraint: Constraint, *, is_wanted: Callable[[], bool] = lambda: True
    ) -> Grammar:
        """Have the engine process compile a constraint; see :class:`GrammarCompiler`."""
        asked = self._ask(lambda number: CompileGrammar(number, constraint))
        while True:
            with suppress(FutureTimeoutError):
                grammar = asked.result(_WANTED_INTERVAL_S)
                assert isinstance(grammar, Grammar), "the answer to a constraint is a grammar"
                return grammar
            if not is_wanted():
                self._drop(constraint)

    def _ask(self, make: Callable[[int], Question]) -> Future[Answer]:
        """Send a question, now or when a process serves; the future has its answer."""
        with self._lock:
            question, future = self._questions.ask(make)
            if (error := self._end_error()) is not None:
                self._questions.take(question.number)
            elif self._serving is not None:
                self._serving.send(question)
        if error is not None:
            future.set_exception(error)
        return future

    def _drop(self, constraint: Constraint) -> None:
        """Tell the process that no request waits for a constraint any more."""
        with self._lock:
            for one in self._questions:
                is_it = isinstance(one, CompileGrammar) and one.constraint is constraint
                if is_it and self._serving is not None:
                    self._serving.send(DropGrammar(one.number))

    def _end_error(self) -> MachdError | None:
        """Why nothing is answered any more; None while the engine is to go on."""
        if self.finished.done() and self.finished.exception() is not None:
            return EngineFaultError("the engine has stopped; the server is restarting")
        return self._stop_error

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - whatever it is, who waits has to learn of it
            if self.front is not None:
                self._log.critical("engine.stopped", error=type(error).__name__, exc_info=error)
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if self.front is None and error is not None:
            self.loaded.set_exception(error)
            self.finished.set_result(None)
        elif self.finished.done():
            pass
        elif error is not None:
            self.finished.set_exception(error)
        else:
            self.finished.set_result(None)
        told = self._stop_error or EngineFaultError(
            "the engine has stopped; the server is restarting"
        )
        with self._lock:
            self._serving = None
            unanswered = self._questions.take_all()
            everything = list(self._sequences)
            events = self._sequences.end(
                everything, FinishReason.ERROR, told, self._clock.monotonic_s()
            )
        for future in unanswered:
            future.set_exception(told)
        self._listener.publish(events)

    def _run(self) -> None:
        """Start processes, one after another, until a stop.

        Raises:
            MachdError: The model cannot be loaded, or processes end again and again.
        """
        while True:
            status = self._follow_one()
            if self.finished.done() or (self._stopping.is_set() and self.front is None):
                return
            if self._stopping.is_set():
                raise EngineFaultError(
                    f"the engine ended before it was done: {describe_status(status)}"
                )
            if self.front is None and self._fault is not None:
                raise self._fault
            if self.front is None:
                raise EngineFaultError(
                    f"the engine process ended while it loaded the model: {describe_status(status)}"
                )
            self._note_death(status)
            if self._stopping.wait(self._restarts.backoff_s):
                return

    def _follow_one(self) -> int:
        """Start a process and read what it says to its end; returns its exit status."""
        with self._lock:
            settings = self._settings
        process = EngineProcess(self._start_process(settings))
        with self._lock:
            self._process = process
            self._reason, self._fault, self._allowed_s = RestartReason.EXIT, None, 0.0
            if self._stop_error is not None:
                process.kill()
        try:
            while (message := process.receive()) is not None:
                if isinstance(message, Report | Beat | Served):  # they come from the engine thread
                    self._beat_s = self._clock.monotonic_s()
                self._take(process, message)
        except BaseException:
            process.kill()
            raise
        finally:
            with self._lock:
                self._process = self._serving = None
            status = process.wait(_EXIT_S)
        return status

    def _take(self, process: EngineProcess, message: ToFront) -> None:
        match message:
            case Report(events, snapshot):
                self._report(events, snapshot)
            case Beat(allowed_s):
                self._allowed_s = allowed_s
            case Served(state, changed):
                self._served(process, state, changed)
            case Answered() | GrammarCompiled():
                self._answer(message)
            case BlocksChanged(event):
                self._listener.block_changed(event)
            case Progress() | Located():
                self._show(message)
            case LoadFailed(error) | Ended(error):
                self._note_end(error)

    def _note_end(self, fault: MachdError | None) -> None:
        """Note how the engine ends. Told to, it has ended here already: its process may have blocks to write still."""
        self._fault = fault
        if not self._stopping.is_set() or self.front is None:
            return
        if fault is not None:
            self.finished.set_exception(fault)
        else:
            self.finished.set_result(None)

    def _report(self, events: Sequence[Event], snapshot: LoopSnapshot | None) -> None:
        if snapshot is not None:
            self.snapshot = snapshot
            if not snapshot.running_count + snapshot.waiting_count:
                self.idle_snapshot = snapshot
        if events:
            with self._lock:
                has_answered = self._sequences.follow(events)
                self._release()
            if has_answered:
                self._restarts.forget()
            self._listener.publish(list(events))

    def _served(self, process: EngineProcess, state: ServedState, changed: frozenset[str]) -> None:
        self.state = state
        if self._serving is not None:
            self._listener.verdicts_changed(changed)
            return
        is_first = self.front is None
        if is_first:
            self.front = self._open_front(state.model, self)
        with self._lock:
            self._serving = process
            process.send(SetLimits(self._settings))
            self._resume(process)
            for question in self._questions:
                process.send(question)
            if self._stop_error is not None:
                process.send(Stop(self._stop_error))
        if is_first:
            self.loaded.set_result(None)
        else:
            self._listener.engine_served()
            self._log.info("engine.restarted", sequences=len(self._sequences), pid=process.pid)

    def _resume(self, process: EngineProcess) -> None:
        """Send the open sequences to a new process; one at a time if processes end again and again. The lock is held."""
        resumed = self._sequences.resumed()
        self._held.clear()
        self._isolated = None
        if self._restarts.is_isolating:
            self._held.extend(one for requests in resumed for one in requests)
            self._release()
            return
        for requests in resumed:
            process.send(Submit(requests))
            self._sequences.note_sent(requests)

    def _release(self) -> None:
        """Send the next sequence of those that go alone, once the one before has ended. The lock is held."""
        if self._isolated in self._sequences:
            return
        self._isolated = None
        while self._held and self._isolated is None and self._serving is not None:
            request = self._held.popleft()
            if request.sequence_id in self._sequences:  # not aborted while it was held
                self._isolated = request.sequence_id
                self._serving.send(Submit((request,)))
                self._sequences.note_sent((request,))

    def _answer(self, answer: Answered | GrammarCompiled) -> None:
        with self._lock:
            future = self._questions.take(answer.number)
        resolve(future, answer)

    def _show(self, message: Progress | Located) -> None:
        if self.front is not None:
            return  # it is there, and no progress of a restart is shown
        if isinstance(message, Located):
            self._open_front = self._prepare_front(message)
        elif message.stage is None:
            self._progress.advance(message.done_bytes)
        else:
            self._progress.stage(message.stage, message.total_bytes)

    def _note_death(self, status: int) -> None:
        """Say that a process has ended, and end the sequence that two of them could not stand.

        Raises:
            EngineFaultError: Too many have ended without a whole answer between them.
        """
        reason = RestartReason.FAULT if self._fault is not None else self._reason
        with self._lock:
            events = self._sequences.survive(
                EngineFaultError("the engine failed while computing this request"),
                self._clock.monotonic_s(),
            )
        # Nothing runs until the next process says so.
        self.snapshot = replace(
            self.snapshot,
            running_count=0,
            active_loops=0,
            waiting_count=len(self._sequences),
            prefilled_tokens={},
        )
        self._log.error(
            "engine.process_ended",
            reason=reason.value,
            status=describe_status(status),
            sequences=len(self._sequences),
        )
        self._listener.publish(events)
        self._restarts.note()
        self._listener.engine_ended(reason)


def _told(asked: Future[Answer], read: Callable[[Answer], _T]) -> Future[_T]:
    """Return a future of what an answer says."""
    told: Future[_T] = Future()
    told.set_running_or_notify_cancel()

    def tell(done: Future[Answer]) -> None:
        error = done.exception()
        if error is None:
            told.set_result(read(done.result()))
        else:
            told.set_exception(error)

    asked.add_done_callback(tell)
    return told
