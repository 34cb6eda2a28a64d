"""The engine process's end of the link: the front's messages go to the loop, and the loop's events to the front.

When the link ends, the process exits: without its front an engine has no use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import structlog

from machd.capabilities.fit import MemoryNeeds
from machd.engine.protocol.encoder import EncoderInput
from machd.engine.protocol.engine import GrammarCompiler, ModelFront
from machd.engine.protocol.media import PlainArray
from machd.engine_process.grammar_requests import GrammarRequests
from machd.errors import EngineFaultError, MachdError
from machd.link.block_events import KvEvent
from machd.link.frames import Frames
from machd.link.logged_event import LoggedEvent
from machd.link.messages import (
    Abort,
    Answered,
    Beat,
    BlocksChanged,
    ChangeConfig,
    ClearPrefixes,
    CompileGrammar,
    Drop,
    Encode,
    Encoded,
    Ended,
    LoadFailed,
    Located,
    Logged,
    Place,
    Progress,
    Report,
    Served,
    SetLimits,
    Sized,
    Stop,
    Submit,
    ToEngine,
    ToFront,
)
from machd.link.port import EnginePort, RestartReason
from machd.link.snapshot import LoopSnapshot
from machd.link.wire import decode_to_engine, encode
from machd.scheduler.events import Event, FinishReason, SequenceFinished
from machd.scheduler.subscriber import SequenceRequest
from machd.settings.model import Settings

_CLOSE_S = 15.0
"""Time for the engine to close: the disk tier writes its queued blocks."""


class FrontLink:
    """A :class:`machd.link.port.EngineListener` that reports to the front and reads its messages."""

    def __init__(
        self, frames: Frames, on_settings: Callable[[Settings], None], *, model_name: str = ""
    ) -> None:
        """Take over an end of the link.

        Args:
            frames: To the front.
            on_settings: Told of other settings that are in force from now on.
            model_name: The model's among others; empty for the only one.
        """
        self.model_name = model_name
        self._frames = frames
        self._on_settings = on_settings
        self._sending = threading.Lock()
        self._has_ended = False
        self._untold: LoopSnapshot | None = None
        self._allowed_s = 0.0
        self._loop: EnginePort | None = None
        self._placed = threading.Event()
        self._place: Settings | None = None
        self._grammars = GrammarRequests(self._send)
        self._inputs: dict[int, tuple[EncoderInput, ...]] = {}

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Report a stage of loading; see :class:`machd.engine.protocol.progress.LoadProgress`."""
        self._send(Progress(name, total_bytes, 0))

    def advance(self, done_bytes: int) -> None:
        """Report more bytes of the stage."""
        self._send(Progress(None, None, done_bytes))

    def located(self, kind: str, path: str, model_id: str) -> None:
        """Report the place of the model's files."""
        self._send(Located(kind, path, model_id))

    def publish(self, events: list[Event]) -> None:
        """Report the events of a step, with the newest counts."""
        if not self._has_ended:
            self._send(Report(tuple(events), self._take_untold()))

    def verdicts_changed(self, changed: frozenset[str]) -> None:
        """Report changed verdicts."""
        assert self._loop is not None
        assert self._loop.state is not None, "verdicts are of a loaded model"
        self._send(Served(self._loop.state, changed, self._take_untold()))

    def block_changed(self, event: KvEvent) -> None:
        """Report a change of the blocks in memory."""
        self._send(BlocksChanged(event))

    def logged(self, event: LoggedEvent) -> None:
        """Report an event of the log, on whatever thread logs."""
        self._send(Logged(event))

    def engine_ended(self, reason: RestartReason) -> None:
        """Do nothing: the front sees it."""

    def engine_served(self) -> None:
        """Do nothing: the front sees it."""

    def note(self, snapshot: LoopSnapshot) -> None:
        """Keep new counts, to be reported with the events of the same step or with the next heartbeat."""
        self._untold = snapshot

    def beat(self, allowed_s: float) -> None:
        """Report a heartbeat, with the extra time until the next one."""
        if allowed_s != self._allowed_s:
            self._allowed_s = allowed_s
            self._send(Beat(allowed_s))
        if self._untold is not None:
            self.publish([])

    def model_sized(self, needs: MemoryNeeds, device_memory_bytes: int) -> None:
        """Tell what the model needs; :meth:`wait_placed` waits for the answer."""
        self._placed.clear()
        self._send(Sized(needs, device_memory_bytes))

    def wait_placed(self) -> Settings:
        """Wait until the model may be put into memory; returns the settings of its place."""
        self._placed.wait()
        assert self._place is not None, "it is set before"
        return self._place

    def refuse(self, error: MachdError) -> None:
        """Report that the model cannot be loaded."""
        self._send(LoadFailed(error))
        self._frames.end()

    def serve(self, loop: EnginePort) -> None:
        """Run the loop for the front until it has ended.

        If the front ends first, the process exits at once.
        """
        self._loop = loop
        loop.loaded.add_done_callback(self._loaded)
        loop.finished.add_done_callback(self._finished)
        loop.start()
        while (parts := self._frames.receive()) is not None:
            self._take(loop, decode_to_engine(parts))
        if not loop.finished.done():
            os._exit(1)
        loop.join(_CLOSE_S)

    def _take_untold(self) -> LoopSnapshot | None:
        snapshot, self._untold = self._untold, None
        return snapshot

    def _loaded(self, loaded: Future[None]) -> None:
        """Report that the model is served, or why it could not be loaded; called on the engine thread."""
        assert self._loop is not None
        error = loaded.exception()
        if error is None:
            assert self._loop.state is not None
            if self._loop.front is not None:
                _close_texts(self._loop.front)
            self._send(Served(self._loop.state, frozenset(), self._take_untold()))
            return
        if not isinstance(error, MachdError):
            structlog.get_logger("machd.daemon").critical("model.load_failed", exc_info=error)
            error = EngineFaultError("the model could not be loaded; the log says why")
        self.refuse(error)

    def _finished(self, finished: Future[None]) -> None:
        """Report the end; called on the engine thread. Sequences of a failed engine are resumed by the next process."""
        error = finished.exception()
        if error is not None:
            self._has_ended = True
            self._send(Ended(EngineFaultError("the engine has stopped")))
        else:
            self._send(Ended(None))
        self._frames.end()

    def _take(self, loop: EnginePort, message: ToEngine) -> None:
        match message:
            case Submit(requests):
                self._submit(loop, requests)
            case Abort(sequence_ids, error):
                loop.abort(sequence_ids, error)
            case ChangeConfig() | SetLimits() | ClearPrefixes():
                self._reconfigure(loop, message)
            case CompileGrammar() | Encode() | Drop():
                self._work_beside(loop, message)
            case Place(settings):
                loop.place(settings)
                self._place = settings
                self._placed.set()
            case Stop(error):
                loop.stop(error)

    def _work_beside(self, loop: EnginePort, message: CompileGrammar | Encode | Drop) -> None:
        """Take a question that has no sequence."""
        match message:
            case CompileGrammar():
                self._grammars.compile(_grammars(loop), message)
            case Encode():
                self._encode(loop, message)
            case Drop(number):
                self._grammars.drop(number)
                loop.drop_inputs(self._inputs.pop(number, ()))

    def _encode(self, loop: EnginePort, asked: Encode) -> None:
        self._inputs[asked.number] = asked.inputs

        def tell(done: Future[PlainArray]) -> None:
            self._inputs.pop(asked.number, None)
            error = _operating(done.exception())
            if error is not None:
                self._send(Answered(asked.number, error, None))
            else:
                self._send(Encoded(asked.number, done.result()))

        loop.encode(asked.inputs, is_suspect=asked.is_suspect).add_done_callback(tell)

    def _submit(self, loop: EnginePort, requests: tuple[SequenceRequest, ...]) -> None:
        """Submit sequences with their compiled grammars, or end all of them with the error of one."""
        try:
            loop.submit(tuple(_bound(_grammars(loop), one) for one in requests))
        except MachdError as error:
            self._send(Report(tuple(_unsubmitted(one, error) for one in requests), None))

    def _reconfigure(
        self, loop: EnginePort, message: ChangeConfig | SetLimits | ClearPrefixes
    ) -> None:
        match message:
            case ChangeConfig(number, settings, is_measured):
                self._on_settings(settings)
                self._answer(number, loop.change_config(settings, measure=is_measured))
            case SetLimits(settings):
                self._on_settings(settings)
                loop.set_limits(settings)
            case ClearPrefixes(number, is_disk_included):
                self._answer(number, loop.clear_prefixes(is_disk_included=is_disk_included))

    def _answer(self, number: int, answer: Future[None] | Future[int]) -> None:
        def tell(done: Future[None] | Future[int]) -> None:
            error = _operating(done.exception())
            self._send(Answered(number, error, None if error else done.result()))

        answer.add_done_callback(tell)

    def _send(self, message: ToFront) -> None:
        parts = encode(message)
        try:
            with self._sending:
                self._frames.send(parts)
        except OSError:
            return  # the thread that reads the link sees its end


def _operating(error: BaseException | None) -> MachdError | None:
    """Return an error as the front may read it."""
    if error is None or isinstance(error, MachdError):
        return error
    return EngineFaultError(f"{type(error).__name__}; the log says more")


def _close_texts(front: ModelFront) -> None:
    """End the processes of template and media that loading needed; the front process has its own."""
    front.tokenizer.close()
    if front.media is not None:
        front.media.close()


def _grammars(loop: EnginePort) -> GrammarCompiler:
    assert loop.front is not None, "the front asks once the model is served"
    return loop.front.grammars


def _bound(grammars: GrammarCompiler, request: SequenceRequest) -> SequenceRequest:
    """Give a request's grammar its compiled form, which did not cross the link."""
    grammar = request.sampling.grammar
    if grammar is None:
        return request
    compiled = grammars.compile(grammar.constraint)
    return replace(request, sampling=replace(request.sampling, grammar=compiled))


def _unsubmitted(request: SequenceRequest, error: MachdError) -> SequenceFinished:
    return SequenceFinished(
        sequence_id=request.sequence_id,
        reason=FinishReason.ERROR,
        error=error,
        prompt_tokens=len(request.prompt),
        cached_tokens=0,
        completion_tokens=len(request.generated_token_ids),
        at_s=request.arrived_s,
    )
