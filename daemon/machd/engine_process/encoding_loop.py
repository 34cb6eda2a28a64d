"""The engine thread of a model that makes vectors or labels: it loads the model, and computes waiting texts pass by pass."""

from __future__ import annotations

import math
import os
import queue
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog

from machd.clock import Clock
from machd.engine.protocol.encoder import Encoder, EncoderInput
from machd.engine.protocol.engine import ModelFront
from machd.engine.protocol.media import PlainArray
from machd.engine_process.encoding_passes import next_pass
from machd.engine_process.loop_snapshot import Pulse
from machd.errors import EngineFaultError, MachdError, OverloadedError
from machd.link.snapshot import LoopSnapshot
from machd.link.state import ServedState
from machd.scheduler.subscriber import SequenceRequest
from machd.settings.model import Settings

_IDLE_WAIT_S = 0.5
"""How long an idle thread sleeps between heartbeats."""

_NOTE_INTERVAL_S = 0.5
"""Interval of memory readings, and of counts that have not changed."""

_FLOAT_BYTES = 4


@dataclass(slots=True, eq=False)
class _Question:
    """Texts that are asked together.

    Attributes:
        rows: float32 numbers of the texts that are computed, by their places.
    """

    inputs: tuple[EncoderInput, ...]
    is_suspect: bool
    done: Future[PlainArray] = field(default_factory=Future)
    rows: dict[int, memoryview] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Shield ``done``: it is answered or forgotten, never cancelled."""
        self.done.set_running_or_notify_cancel()

    def put(self, place: int, row: memoryview) -> None:
        """Note the numbers of a text; the last one answers the question, unless it has failed."""
        if self.done.done():
            return
        self.rows[place] = row
        if len(self.rows) == len(self.inputs):
            content = b"".join(self.rows[one] for one in range(len(self.inputs)))
            self.done.set_result(
                PlainArray(
                    (len(self.rows), len(row) // _FLOAT_BYTES), "float32", memoryview(content)
                )
            )

    def fail(self, error: BaseException) -> None:
        """Answer with an error; the first one counts."""
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One text that is not computed yet."""

    question: _Question
    place: int

    @property
    def input(self) -> EncoderInput:
        """Its tokens."""
        return self.question.inputs[self.place]


class EncodingLoop:
    """Owner of an :class:`Encoder` and the thread that it lives on; a :class:`machd.link.port.EnginePort` without a front."""

    front: ModelFront | None = None
    is_changing_config = False

    def __init__(
        self,
        load: Callable[[], Encoder],
        *,
        clock: Clock,
        on_note: Callable[[LoopSnapshot], None] = lambda _snapshot: None,
        on_beat: Callable[[float], None] = lambda _allowed_s: None,
    ) -> None:
        """Prepare the thread; :meth:`start` runs it.

        Args:
            load: Makes the encoder; called on the thread.
            clock: Reads time.
            on_note: Called on the thread with new counts.
            on_beat: Called on the thread at each heartbeat, with 0.
        """
        self.loaded: Future[None] = Future()
        self.finished: Future[None] = Future()
        self.state: ServedState | None = None
        self.snapshot = self.idle_snapshot = LoopSnapshot()
        self._load = load
        self._clock = clock
        self._on_note = on_note
        self._pulse = Pulse(clock, on_beat)
        self._log = structlog.get_logger("machd.engine")
        self._inbox: queue.SimpleQueue[_Question | tuple[EncoderInput, ...] | MachdError] = (
            queue.SimpleQueue()
        )
        self._waiting: list[_Waiting] = []
        self._noted_s = -math.inf
        self._error: MachdError = EngineFaultError("the engine has stopped")
        self._thread = threading.Thread(target=self._main, name="machd-engine", daemon=True)

    @property
    def pid(self) -> int:
        """Number of this process."""
        return os.getpid()

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the thread last began a pass or was idle."""
        return self._pulse.age_s

    def start(self) -> None:
        """Run the thread."""
        self._thread.start()

    def encode(
        self, inputs: tuple[EncoderInput, ...], *, is_suspect: bool = False
    ) -> Future[PlainArray]:
        """Make vectors or labels of texts; see :meth:`machd.link.port.EnginePort.encode`."""
        question = _Question(inputs, is_suspect)
        self._inbox.put(question)
        return question.done

    def drop_inputs(self, inputs: tuple[EncoderInput, ...]) -> None:
        """Forget texts that no request waits for any more."""
        self._inbox.put(inputs)

    def submit(self, requests: tuple[SequenceRequest, ...]) -> None:  # noqa: ARG002 - the port's
        """Raise: an encoder generates nothing, and its front knows that."""
        raise AssertionError("sequences are computed by a model that generates")

    def abort(self, sequence_ids: tuple[str, ...], error: MachdError | None) -> None:
        """Do nothing: there are no sequences."""

    def change_config(self, settings: Settings, *, measure: bool = False) -> Future[None]:  # noqa: ARG002
        """Do nothing: there is nothing to schedule."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_limits(self, settings: Settings) -> None:
        """Do nothing: the front has the limits."""

    def clear_prefixes(self, *, is_disk_included: bool) -> Future[int]:  # noqa: ARG002
        """Return 0 blocks: there is no cache."""
        done: Future[int] = Future()
        done.set_result(0)
        return done

    def place(self, settings: Settings) -> None:
        """Do nothing: there is no KV budget."""

    def suspend(self) -> None:
        """Return None: a thread cannot be ended, nor its memory given back."""

    def resume(self) -> Future[None]:
        """Return what :meth:`start` has begun: the model was never suspended."""
        return self.loaded

    def kill(self) -> bool:
        """Do nothing: a thread cannot be ended."""
        return False

    def stop(self, error: MachdError) -> None:
        """Tell the thread to answer all open questions with ``error`` and then to end."""
        self._inbox.put(error)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            encoder = self._load()
            self.state = ServedState.of(encoder.model, None)
            self._note(encoder)
        except BaseException as error:  # noqa: BLE001 - whatever it is, who waits has to learn of it
            self.loaded.set_exception(error)
            self.finished.set_result(None)
            return
        self.loaded.set_result(None)
        try:
            self._serve(encoder)
        except BaseException as error:  # noqa: BLE001 - a thread that ends in silence is the one forbidden state
            self._log.critical("engine.stopped", error=type(error).__name__, exc_info=error)
            self.finished.set_exception(error)
        else:
            self.finished.set_result(None)
        finally:
            for one in self._waiting:
                one.question.fail(self._error)
            encoder.close()

    def _serve(self, encoder: Encoder) -> None:
        """Compute passes until told to stop."""
        while self._take_messages():
            self._pulse.beat()
            if self._waiting:
                self._compute(encoder, self._next_pass(encoder))
            self._note(encoder)

    def _take_messages(self) -> bool:
        """Take what has come, and wait for it where nothing is to be done; return False at a stop."""
        wait_s = 0.0 if self._waiting else _IDLE_WAIT_S
        try:
            message = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                match message:
                    case MachdError():
                        self._error = message
                        return False
                    case _Question():
                        self._queue(message)
                    case _:
                        self._drop(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _drop(self, inputs: tuple[EncoderInput, ...]) -> None:
        self._waiting = [one for one in self._waiting if one.question.inputs is not inputs]

    def _queue(self, question: _Question) -> None:
        texts = [_Waiting(question, place) for place in range(len(question.inputs))]
        suspects = sum(one.question.is_suspect for one in self._waiting)
        at = suspects if question.is_suspect else len(self._waiting)
        self._waiting[at:at] = texts

    def _next_pass(self, encoder: Encoder) -> list[_Waiting]:
        """Take the texts of the next pass from those that wait; a suspect's are computed without others."""
        first = self._waiting[0].question
        candidates = self._waiting
        if first.is_suspect:
            candidates = [one for one in self._waiting if one.question is first]
        lengths = [len(one.input.token_ids) for one in candidates]
        chosen = [candidates[place] for place in next_pass(lengths, packs=encoder.packs)]
        taken = set(map(id, chosen))
        self._waiting = [one for one in self._waiting if id(one) not in taken]
        return chosen

    def _compute(self, encoder: Encoder, texts: Sequence[_Waiting]) -> None:
        """Compute a pass; one that fails is computed again in halves, until the text to blame is alone."""
        try:
            values = encoder.encode([one.input for one in texts])
        except Exception as error:  # noqa: BLE001 - any failure of a pass is an engine fault, logged here
            if len(texts) > 1:
                middle = len(texts) // 2
                self._compute(encoder, texts[:middle])
                self._compute(encoder, texts[middle:])
            else:
                self._fail(texts[0].question, error)
            return
        row_bytes = len(values.content) // len(texts)
        for index, one in enumerate(texts):
            row = values.content[index * row_bytes : (index + 1) * row_bytes]
            if all(map(math.isfinite, array("f", bytes(row)))):
                one.question.put(one.place, row)
            else:
                self._fail(one.question, EngineFaultError("the model's numbers are not finite"))

    def _fail(self, question: _Question, error: Exception) -> None:
        """Answer a question with an error, and forget its other texts."""
        if isinstance(error, MemoryError):
            error = OverloadedError("the server has too little memory left for this request")
        elif not isinstance(error, MachdError):
            self._log.error("engine.step_failed", exc_info=error, in_a_row=1)
            error = EngineFaultError("the engine failed while computing this request")
        question.fail(error)
        self._waiting = [one for one in self._waiting if one.question is not question]

    def _note(self, encoder: Encoder) -> None:
        """Take the counts where they have changed, or once in a while: a reading of memory takes as long as a short text."""
        now_s = self._clock.monotonic_s()
        waiting = len({id(one.question) for one in self._waiting})
        counts = min(waiting, 1), max(waiting - 1, 0)
        is_due = now_s - self._noted_s >= _NOTE_INTERVAL_S
        if not is_due and counts == (self.snapshot.running_count, self.snapshot.waiting_count):
            return
        memory = self.snapshot.memory
        if is_due:
            self._noted_s = now_s
            try:
                memory = encoder.memory()
            except OSError as error:
                self._log.warning("memory.not_read", exc_info=error)
        self.snapshot = LoopSnapshot(
            taken_unix_s=self._clock.unix_s(),
            slot_count=1,
            running_count=counts[0],
            waiting_count=counts[1],
            memory=memory,
        )
        if not waiting:
            self.idle_snapshot = self.snapshot
        self._on_note(self.snapshot)
