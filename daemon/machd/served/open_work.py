"""The unfinished work of engine processes: open sequences, unanswered questions, and the settings in force.

A process that begins to serve is sent all of it, and resumes where the former one ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from machd.clock import Clock
from machd.engine.protocol.encoder import EncoderInput
from machd.engine.protocol.media import PlainArray
from machd.errors import EngineFaultError, MachdError
from machd.link.messages import (
    Abort,
    Answered,
    ChangeConfig,
    ClearPrefixes,
    CompileGrammar,
    Drop,
    Encode,
    Encoded,
    GrammarCompiled,
    SetLimits,
    Stop,
    Submit,
)
from machd.request.constraint import Constraint
from machd.scheduler.events import Event, FinishReason
from machd.scheduler.subscriber import SequenceRequest
from machd.served.engine_process import EngineProcess
from machd.served.isolated_sequences import IsolatedSequences
from machd.served.open_sequences import OpenSequences
from machd.served.questions import Answer, Question, Questions, read_answer, resolve
from machd.settings.model import Settings


class ModelSuspendedError(Exception):
    """A question was put to a model that is suspended: it has to be put again once the model is ready."""


class OpenWork:
    """The open work, and the process that serves it. Every method may be called from any thread.

    One lock guards both, so that the process gets each message once and in order.

    Attributes:
        stopping: Set once no other process is to be started.
    """

    def __init__(self, settings: Settings, clock: Clock) -> None:
        """Begin with nothing open and no process; ``settings`` are in force until others come."""
        self.stopping = threading.Event()
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._serving: EngineProcess | None = None
        self._is_suspended = False
        self._refusal: MachdError | None = None
        self._has_ended = False
        self._sequences = OpenSequences()
        self._isolated = IsolatedSequences(self._sequences)
        self._questions = Questions()

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._settings

    @property
    def is_served(self) -> bool:
        """Whether a process has begun to serve, and has not ended."""
        return self._serving is not None

    @property
    def sequence_count(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    @property
    def is_changing_config(self) -> bool:
        """Whether a requested scheduler config is not in force yet."""
        with self._lock:
            return any(isinstance(one, ChangeConfig) for one in self._questions)

    def submit(self, requests: tuple[SequenceRequest, ...]) -> list[Event]:
        """Start the sequences of one request; returns their ends where there is to be no process any more."""
        with self._lock:
            if self._has_ended:
                self._sequences.add(requests)
                ids = [one.sequence_id for one in requests]
                now_s = self._clock.monotonic_s()
                return self._sequences.end(ids, FinishReason.ERROR, self._refusal, now_s)
            is_sent = self._serving is not None and not self._isolated.is_active
            if self._serving is not None and is_sent:
                # Sent before the sequences are noted: it may raise MemoryError.
                self._serving.send(Submit(requests))
            self._sequences.add(requests)
            if is_sent:
                self._sequences.note_sent(requests)
            elif self._isolated.is_active:
                self._isolated.hold(requests)
        return []

    def abort(self, sequence_ids: tuple[str, ...], error: MachdError | None) -> list[Event]:
        """Abort sequences; return the final events of those that no process has."""
        with self._lock:
            held_ids = self._isolated.held_ids
            sent_ids, unsent_ids = list[str](), list[str]()
            for one in filter(self._sequences.__contains__, sequence_ids):
                is_sent = self._serving is not None and one not in held_ids
                (sent_ids if is_sent else unsent_ids).append(one)
            if self._serving is not None and sent_ids:
                self._serving.send(Abort(tuple(sent_ids), error))
            now_s = self._clock.monotonic_s()
            return self._sequences.end(unsent_ids, FinishReason.ABORT, error, now_s)

    def change_config(self, settings: Settings, *, measure: bool) -> Future[None]:
        """Apply settings after the running step; see :meth:`machd.link.port.EnginePort.change_config`."""
        with self._lock:
            self._settings = settings
        asked = self.ask(lambda number: ChangeConfig(number, settings, measure))
        return read_answer(asked, lambda _: None)

    def set_limits(self, settings: Settings) -> None:
        """Apply other limits to new, waiting and running requests and to caches, from the next step on."""
        with self._lock:
            self._settings = settings
            if self._serving is not None:
                self._serving.send(SetLimits(settings))

    def clear_prefixes(self, *, is_disk_included: bool) -> Future[int]:
        """Drop the unused blocks of the prefix cache; resolves to their number."""
        asked = self.ask(lambda number: ClearPrefixes(number, is_disk_included))
        return read_answer(asked, lambda count: count if isinstance(count, int) else 0)

    def ask(self, make: Callable[[int], Question]) -> Future[Answer]:
        """Send a question, now or once a process serves; return a future of its answer.

        While the model is suspended, one about a grammar fails with :class:`ModelSuspendedError`: a thread waits for
        the answer, which other models need.
        """
        with self._lock:
            question, future = self._questions.ask(make)
            refusal: Exception | None = self._refusal
            if refusal is None and self._is_suspended and isinstance(question, CompileGrammar):
                refusal = ModelSuspendedError()
            if refusal is not None:
                self._questions.take(question.number)
            elif self._serving is not None:
                self._serving.send(question)
        if refusal is not None:
            future.set_exception(refusal)
        return future

    def encode(self, inputs: tuple[EncoderInput, ...], *, is_suspect: bool) -> Future[PlainArray]:
        """Make vectors or labels of texts; see :meth:`machd.link.port.EnginePort.encode`."""
        asked = self.ask(lambda number: Encode(number, inputs, is_suspect))
        return read_answer(asked, _as_array)

    def drop_inputs(self, inputs: tuple[EncoderInput, ...]) -> None:
        """Forget texts that no request waits for any more; their future never resolves."""
        with self._lock:
            for one in list(self._questions):
                if isinstance(one, Encode) and one.inputs is inputs:
                    self._questions.take(one.number)
                    self._drop(one.number)

    def drop_constraint(self, constraint: Constraint) -> None:
        """Tell the process that no request waits for a constraint any more."""
        with self._lock:
            for one in self._questions:
                if isinstance(one, CompileGrammar) and one.constraint is constraint:
                    self._drop(one.number)

    def _drop(self, number: int) -> None:
        if self._serving is not None:
            self._serving.send(Drop(number))

    def stop(self, error: MachdError) -> bool:
        """Tell the process to end all sequences with ``error`` and then itself; refuse later questions.

        Returns:
            Whether a process serves and was told.
        """
        with self._lock:
            if self._refusal is None:
                self._refusal = error
            serving = self._serving
            refused = self._questions.take_all(ChangeConfig)
        for future in refused:
            future.set_exception(error)
        self.stopping.set()  # before the process can answer
        if serving is not None:
            serving.send(Stop(error))
        return serving is not None

    def begin(self, process: EngineProcess, *, is_isolating: bool) -> None:
        """Tell a process that has loaded the model, and serves from now on, all that is open.

        With ``is_isolating`` it computes the open sequences one at a time.
        """
        with self._lock:
            self._serving, self._is_suspended = process, False
            process.send(SetLimits(self._settings))
            self._resume(process, is_isolating=is_isolating)
            for question in self._questions:
                process.send(question)
            if self._refusal is not None:
                process.send(Stop(self._refusal))

    def _resume(self, process: EngineProcess, *, is_isolating: bool) -> None:
        resumed = self._sequences.resumed()
        self._isolated.clear()
        if is_isolating:
            self._isolated.hold(one for requests in resumed for one in requests)
            self._send_next(process)
            return
        for requests in resumed:
            self._send(process, requests)

    def _send_next(self, process: EngineProcess) -> None:
        """Send the next isolated sequence once the one before has ended."""
        request = self._isolated.take_next()
        if request is not None:
            self._send(process, (request,))

    def _send(self, process: EngineProcess, requests: tuple[SequenceRequest, ...]) -> None:
        process.send(Submit(requests))
        self._sequences.note_sent(requests)

    def forget_process(self) -> None:
        """Note that the process has ended; all open work is kept for the next one."""
        with self._lock:
            self._serving = None

    def suspend(self, error: MachdError) -> bool:
        """Have the process end, and keep everything but questions about grammars for the next one.

        Nothing that it says later is followed.

        Args:
            error: What the process ends its own sequences with; nobody reads it.

        Returns:
            Whether a process serves, which is told.
        """
        with self._lock:
            serving, self._serving = self._serving, None
            self._is_suspended = True
            self._sequences.pause()
            unanswered = self._questions.take_all(CompileGrammar)
            if serving is not None:
                serving.send(Stop(error))
        for future in unanswered:
            future.set_exception(ModelSuspendedError())
        return serving is not None

    def follow(self, events: Sequence[Event]) -> bool | None:
        """Note what has come of sequences.

        Returns:
            Whether one has a whole answer; None where no process serves, so that nothing comes of the events.
        """
        with self._lock:
            if self._serving is None:
                return None
            has_answered = self._sequences.follow(events)
            self._send_next(self._serving)
        return has_answered

    def answer(self, answer: Answered | GrammarCompiled | Encoded) -> None:
        """Resolve a question's future."""
        with self._lock:
            future = self._questions.take(answer.number)
        resolve(future, answer)

    def survive(self, fault: MachdError | None) -> list[Event]:
        """Suspect what a process computed that has ended, without a fault nothing.

        Returns:
            The final events of sequences that are to blame; see :meth:`OpenSequences.survive`. Texts that are, see
            :meth:`Questions.suspect`, are answered with the fault.
        """
        with self._lock:
            if fault is None:
                self._sequences.pause()
                return []
            blamed = self._questions.suspect()
            events = self._sequences.survive(fault, self._clock.monotonic_s())
        if blamed is not None:
            blamed.set_exception(fault)
        return events

    def end(self) -> list[Event]:
        """End all open work with the error of :meth:`stop` or with a fault; return the sequences' final events."""
        with self._lock:
            if self._refusal is None:
                self._refusal = EngineFaultError("the engine has stopped; the server is restarting")
            error, self._serving, self._has_ended = self._refusal, None, True
            unanswered = self._questions.take_all()
            now_s = self._clock.monotonic_s()
            events = self._sequences.end(list(self._sequences), FinishReason.ERROR, error, now_s)
        for future in unanswered:
            future.set_exception(error)
        return events


def _as_array(answer: Answer) -> PlainArray:
    assert isinstance(answer, PlainArray), "the answer to texts is an array"
    return answer
