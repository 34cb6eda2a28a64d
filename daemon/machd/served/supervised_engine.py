"""The engine of one model in a process of its own, which is replaced when it ends.

This module starts processes, reads their messages and replaces them. Their unfinished work is in :class:`OpenWork`,
which is sent to each new process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import structlog

from machd.capabilities.fit import MemoryNeeds
from machd.clock import Clock
from machd.engine.protocol.encoder import EncoderInput
from machd.engine.protocol.engine import GrammarCompiler, ModelDescription, ModelFront
from machd.engine.protocol.media import PlainArray
from machd.engine.protocol.progress import LoadProgress
from machd.errors import DrainDeadlineError, EngineEndedError, EngineFaultError, MachdError
from machd.link.block_events import AllBlocksCleared
from machd.link.messages import (
    Answered,
    Beat,
    BlocksChanged,
    Encoded,
    Ended,
    GrammarCompiled,
    LoadFailed,
    Located,
    Logged,
    Place,
    Progress,
    Report,
    Served,
    Sized,
    ToFront,
)
from machd.link.port import EngineListener, RestartReason
from machd.link.snapshot import LoopSnapshot
from machd.link.state import ServedState
from machd.scheduler.events import Event
from machd.scheduler.subscriber import SequenceRequest
from machd.scheduler.waits import WaitReason, Waits
from machd.served.engine_grammars import EngineGrammars
from machd.served.engine_process import EngineProcess, ProcessEnd
from machd.served.open_work import OpenWork
from machd.served.restarts import Restarts
from machd.served.started_engine import StartedEngine, cannot_start
from machd.served.suspension import Suspension
from machd.settings.model import Settings

_KILLED = "SIGKILL"
"""How a process ends that machd has not ended: an operator's doing, or the kernel's."""

_EXIT_S = 15.0
"""Time for a process to end after it has closed its end of the link."""


OpenFront = Callable[[ModelDescription, GrammarCompiler], ModelFront]
"""Opens the front of the model that an engine process serves; may take a second."""

PrepareFront = Callable[[Located, Settings], OpenFront]
"""Begins to open the texts of the model whose files an engine process has found."""


class SupervisedEngine:
    """The :class:`machd.link.port.EnginePort` of a daemon.

    One thread starts the process, reads its messages and replaces it; ``_lock`` guards the reference to the process
    for :meth:`kill` and :meth:`stop`.
    """

    def __init__(  # noqa: PLR0913 - one argument for each thing that it calls
        self,
        settings: Settings,
        listener: EngineListener,
        *,
        start_process: Callable[[Settings, str], StartedEngine],
        read_files: Callable[[Settings, str], PrepareFront],
        progress: LoadProgress,
        restarts: Restarts,
        clock: Clock,
    ) -> None:
        """Prepare; nothing runs yet.

        Args:
            settings: In force until others come.
            listener: Told what happens.
            start_process: Starts an engine process with these settings, or with older ones, under a name or none.
            read_files: Reads what lies around the weights of a model with a name or none, while its engine process starts;
                raises MachdError where files are damaged.
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
        self._listener = listener
        self._start_process = start_process
        self._read_files = read_files
        self._progress = progress
        self._clock = clock
        self._log = structlog.get_logger("machd.engine")
        self._lock = threading.Lock()
        self._process: EngineProcess | None = None
        self._reason = RestartReason.EXIT
        self._fault: MachdError | None = None
        self._beat_s = clock.monotonic_s()
        self._allowed_s = 0.0
        self._loading = self.loaded
        self._suspension: Suspension | None = None
        self._interrupted = threading.Event()  # ends the wait for another process
        self._restarts = restarts
        self._work = OpenWork(settings, clock)
        self._thread = threading.Thread(target=self._main, name="machd-link", daemon=True)

    @property
    def pid(self) -> int | None:
        """Number of the engine process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the process's last message; 0 while none serves."""
        if not self._work.is_served:
            return 0.0
        return max(0.0, self._clock.monotonic_s() - self._beat_s - self._allowed_s)

    @property
    def is_changing_config(self) -> bool:
        """Whether a requested scheduler config is not in force yet."""
        return self._work.is_changing_config

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    def submit(self, requests: tuple[SequenceRequest, ...]) -> None:
        """Start the sequences of one request."""
        events = self._work.submit(requests)
        if events:
            self._listener.publish(events)

    def abort(self, sequence_ids: tuple[str, ...], error: MachdError | None) -> None:
        """Abort sequences; ``error`` is None if their client needs no more tokens."""
        events = self._work.abort(sequence_ids, error)
        if events:
            self._listener.publish(events)

    def encode(
        self, inputs: tuple[EncoderInput, ...], *, is_suspect: bool = False
    ) -> Future[PlainArray]:
        """Make vectors or labels of texts; see :meth:`machd.link.port.EnginePort.encode`."""
        return self._work.encode(inputs, is_suspect=is_suspect)

    def drop_inputs(self, inputs: tuple[EncoderInput, ...]) -> None:
        """Forget texts that no request waits for any more."""
        self._work.drop_inputs(inputs)

    def change_config(self, settings: Settings, *, measure: bool = False) -> Future[None]:
        """Schedule by other settings after the step that runs; see :meth:`machd.link.port.EnginePort.change_config`."""
        if self._suspension is not None and not measure:
            self._work.set_limits(settings)  # the next process begins with them
            done: Future[None] = Future()
            done.set_result(None)
            return done
        return self._work.change_config(settings, measure=measure)

    def set_limits(self, settings: Settings) -> None:
        """Apply other limits to new, waiting and running requests and to caches, from the next step on."""
        self._work.set_limits(settings)

    def clear_prefixes(self, *, is_disk_included: bool) -> Future[int]:
        """Drop the unused blocks of the prefix cache; resolves to their number."""
        return self._work.clear_prefixes(is_disk_included=is_disk_included)

    def kill(self) -> bool:
        """Kill a hung process; another one replaces it unless the engine is stopping."""
        with self._lock:
            process = self._process
            if process is not None:
                self._reason = RestartReason.STALL
            self._beat_s = self._clock.monotonic_s()
        if process is not None:
            process.kill()
        return True

    def place(self, settings: Settings) -> None:
        """Let the model be put into memory; see :meth:`machd.link.port.EnginePort.place`."""
        self._work.set_limits(settings)
        with self._lock:
            process = self._process
        if process is not None:
            process.send(Place(settings))

    def suspend(self) -> Future[None]:
        """End the process and keep what is open for the next one; see :meth:`machd.link.port.EnginePort.suspend`."""
        with self._lock:
            if self._suspension is None:
                self._suspension = Suspension()
            suspension, process = self._suspension, self._process
            self._interrupted.set()
        is_told = self._work.suspend(DrainDeadlineError("the model is suspended"))
        if process is not None and is_told:
            suspension.kill_after(process.kill, _EXIT_S)
        elif process is not None:
            process.kill()
        return suspension.begun

    def resume(self) -> Future[None]:
        """Load the model again; see :meth:`machd.link.port.EnginePort.resume`."""
        with self._lock:
            suspension, self._suspension = self._suspension, None
            self._interrupted.clear()
            assert suspension is not None, "who is resumed is suspended"
            assert suspension.begun.done(), "the former process has ended"
            if self._loading.done():
                self._loading = Future()
            loading = self._loading
        suspension.end()
        return loading

    def stop(self, error: MachdError) -> None:
        """Tell the process to end all sequences with ``error`` and then itself; kill one that still loads."""
        if self._work.stop(error):
            return
        self._interrupted.set()
        with self._lock:
            process, suspension = self._process, self._suspension
        if suspension is not None:
            suspension.end()
        if process is not None:
            process.kill()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the last process; return whether it has ended."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

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
        if error is not None and not self._loading.done():
            self._loading.set_exception(error)
        if self.front is None and error is not None:
            self.finished.set_result(None)
        elif self.finished.done():
            pass
        elif error is not None:
            self.finished.set_exception(error)
        else:
            self.finished.set_result(None)
        self._listener.publish(self._work.end())

    def _run(self) -> None:
        """Start processes, one after another, until a stop.

        Raises:
            MachdError: The model cannot be loaded, or the limit of restarts is reached.
        """
        while self._suspension is None or self._wait_resumed(self._suspension):
            end = self._follow_one()
            is_stopped_early = self._work.stopping.is_set() and not self._loading.done()
            if self.finished.done() or is_stopped_early:
                return
            if self._suspension is not None:
                continue
            self._note_death(end)
            self._interrupted.wait(self._restarts.backoff_s)
            if self._work.stopping.is_set():
                return

    def _wait_resumed(self, suspension: Suspension) -> bool:
        """Say that the process has ended, and wait; returns whether there is to be another one."""
        self.snapshot = self.idle_snapshot = LoopSnapshot(
            mode=self.snapshot.mode,
            slot_count=self.snapshot.slot_count,
            waiting_count=self._work.sequence_count,
            waits=Waits(WaitReason.MODEL),
        )
        suspension.begin()
        suspension.wait()
        return not self._work.stopping.is_set()

    def _follow_one(self) -> ProcessEnd:
        """Start a process and read its messages until it ends; return how it ended.

        Raises:
            EngineFaultError: The system has no room for the first process. A later one that cannot be started counts as
                ended.
        """
        with self._lock:
            self._reason, self._fault, self._allowed_s = RestartReason.EXIT, None, 0.0
        try:
            process = EngineProcess(
                self._start_process(self._work.settings, self._listener.model_name)
            )
        except OSError as error:
            if self.front is None:
                raise cannot_start(error) from error
            return ProcessEnd(f"not started: {error.strerror}")
        with self._lock:
            self._process = process
            if self._work.stopping.is_set() or self._suspension is not None:
                process.kill()
        try:
            self._read_while_it_starts(process)
            while (message := process.receive()) is not None:
                if isinstance(message, Report | Beat | Served):  # they come from the engine thread
                    self._beat_s = self._clock.monotonic_s()
                self._take(process, message)
        except BaseException:
            process.kill()
            raise
        finally:
            with self._lock:
                self._process = None
            self._work.forget_process()
            end = process.wait(_EXIT_S)
            if self._listener.model_name:
                # It may be long before another process begins with this event, as the only model's does at once.
                self._listener.block_changed(AllBlocksCleared())
        return end

    def _read_while_it_starts(self, process: EngineProcess) -> None:
        """End a process whose model has damaged files before it imports mlx, which takes seconds from other models.

        One that takes the place of a process that has died loads what has been read.
        """
        if self._loading.done():
            return
        try:
            self._prepare_front = self._read_files(self._work.settings, self._listener.model_name)
        except MachdError as error:
            self._note_end(error)
            process.kill()

    def _take(self, process: EngineProcess, message: ToFront) -> None:
        match message:
            case Report(events, snapshot):
                self._report(events, snapshot)
            case Beat(allowed_s):
                self._allowed_s = allowed_s
            case Sized() | Served():
                self._prepare(process, message)
            case Answered() | GrammarCompiled() | Encoded():
                self._answer(message)
            case BlocksChanged(event):
                self._listener.block_changed(event)
            case Progress() | Located() | Logged():
                self._show(message)
            case LoadFailed(error) | Ended(error):
                self._note_end(error)

    def _answer(self, message: Answered | GrammarCompiled | Encoded) -> None:
        """Answer a question; vectors show that the engine works, as a sequence's whole answer does."""
        if isinstance(message, Encoded):
            self._restarts.forget()
        self._work.answer(message)

    def _prepare(self, process: EngineProcess, message: Sized | Served) -> None:
        match message:
            case Sized(needs, device_memory_bytes):
                self._sized(process, needs, device_memory_bytes)
            case Served(state, changed, snapshot):
                self._note_counts(snapshot)
                self._served(process, state, changed)

    def _sized(self, process: EngineProcess, needs: MemoryNeeds, device_memory_bytes: int) -> None:
        """Ask for memory; a process that takes another one's place has its memory."""
        if self._loading.done():
            process.send(Place(self._work.settings))
        else:
            self._listener.model_sized(needs, device_memory_bytes)

    def _note_end(self, fault: MachdError | None) -> None:
        """Note the engine's end. After a stop the port ends at once: the process may still write blocks to disk."""
        self._fault = fault
        if not self._work.stopping.is_set() or self.front is None:
            return
        if fault is not None:
            self.finished.set_exception(fault)
        else:
            self.finished.set_result(None)

    def _report(self, events: Sequence[Event], snapshot: LoopSnapshot | None) -> None:
        has_answered = self._work.follow(events)
        if has_answered is None:
            return  # of a process that is suspended
        self._note_counts(snapshot)
        if has_answered:
            self._restarts.forget()
        if events:
            self._listener.publish(list(events))

    def _note_counts(self, snapshot: LoopSnapshot | None) -> None:
        if snapshot is not None:
            self.snapshot = snapshot
            if not snapshot.running_count + snapshot.waiting_count:
                self.idle_snapshot = snapshot

    def _served(self, process: EngineProcess, state: ServedState, changed: frozenset[str]) -> None:
        self.state = state
        if self._work.is_served:
            self._listener.verdicts_changed(changed)
            return
        if self.front is None:
            self.front = self._open_front(state.model, EngineGrammars(self._work))
            self._log = structlog.get_logger("machd.engine", model=state.model.model_id)
        with self._lock:
            if self._suspension is not None:
                return  # this process is about to end
            self._work.begin(process, is_isolating=self._restarts.is_isolating)
            loading = self._loading
        if not loading.done():
            loading.set_result(None)
        else:
            self._listener.engine_served()
            self._log.info("engine.restarted", sequences=self._work.sequence_count, pid=process.pid)

    def _show(self, message: Progress | Located | Logged) -> None:
        if isinstance(message, Logged):
            self._listener.logged(message.event)
            return
        if isinstance(message, Located):
            if self.front is None:
                self._open_front = self._prepare_front(message, self._work.settings)
            return
        observers: list[LoadProgress] = [self._listener]
        if self.front is None:
            observers.append(self._progress)
        for one in observers:
            if message.stage is None:
                one.advance(message.done_bytes)
            else:
                one.stage(message.stage, message.total_bytes)

    def _note_death(self, end: ProcessEnd) -> None:
        """Report that a process has ended, and end a sequence that crashed two of them.

        Raises:
            MachdError: The model cannot be loaded, the engine was told to stop, or too many processes have ended without
                a whole answer between them.
        """
        if self._work.stopping.is_set():
            raise EngineFaultError(f"the engine ended before it was done: {end.status}")
        if not self._loading.done() and self._fault is not None:
            raise self._fault
        if self.front is None:
            raise EngineEndedError(
                f"the engine process ended while it loaded the model: {end.status}"
            )
        reason = RestartReason.FAULT if self._fault is not None else self._reason
        # Whoever sends this signal accuses no sequence. The kernel's OOM killer sends it, too: if whole answers fail to come,
        # sequences run one at a time, and then one is accused.
        is_killed = reason is RestartReason.EXIT and end.status == _KILLED
        events = self._work.survive(
            None
            if is_killed and not self._restarts.is_isolating
            else EngineFaultError("the engine failed while computing this request")
        )
        # No sequence runs until the next process reports one.
        self.snapshot = replace(
            self.snapshot,
            running_count=0,
            active_loops=0,
            waiting_count=self._work.sequence_count,
            prefilled_tokens={},
            waits=Waits(WaitReason.MODEL),
        )
        self._log.error(
            "engine.process_ended",
            reason=reason.value,
            status=end.status,
            sequences=self._work.sequence_count,
            last_lines=end.last_lines,
        )
        self._listener.publish(events)
        self._restarts.note()
        self._listener.engine_ended(reason)
