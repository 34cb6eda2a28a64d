"""A generation as an HTTP response: a stream of events or of lines, or one JSON body.

The framework's streaming response neither closes its generator nor frees anything when a client
leaves, so this one is ours: the generation is let go in a synchronous ``finally``, whatever
happened, and the client's departure is watched for at every phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog
from litestar.types import Receive, Scope, Send

from machd.clock import Clock
from machd.errors import ClientDisconnectedError, ClientStalledError, MachdError, RowFaultError
from machd.generations.choice import ChoiceDelta
from machd.generations.generation import Generation, GenerationUsage
from machd.generations.prefill_progress import PrefillProgress, phase_of, prefill_progress
from machd.http.answering import connection_of
from machd.http.pacing import Pacer, merge_deltas
from machd.http.sse import COMMENT_KEEP_ALIVE, EVENT_STREAM, comment
from machd.http.told_progress import LOOK_S, TellProgress, ToldProgress
from machd.link.snapshot import LoopSnapshot
from machd.panics import ENDINGS
from machd.scheduler.events import SequenceAdmitted

_ROW_FAULT = "the generation failed inside the server"
_UNKNOWN = "unknown"
"""The reason before a prompt was looked up."""

_Headers = list[tuple[bytes, bytes]]


class StreamShape(Protocol):
    """What a stream has before its answer begins, in one endpoint family's shapes."""

    @property
    def media_type(self) -> bytes:
        """The Content-Type of a stream."""
        ...

    @property
    def keep_alive(self) -> bytes:
        """The frame that is sent while there is no news."""
        ...

    def failure(self, error: MachdError) -> bytes:
        """Events that end a stream that has begun and cannot go on."""
        ...


class Dialect(StreamShape, Protocol):
    """Writer of one generation in one endpoint family's shapes: a fold over its deltas.

    Every answer is pushed, delta by delta. A stream is the frames that this gives, between those of
    ``opening`` and ``closing``; an unstreamed answer is what ``finish`` makes of the same pushes.
    Frames are whole, made by :mod:`machd.http.sse`; several at once are joined, and no bytes at all
    are no event.
    """

    def opening(self, usage: GenerationUsage) -> bytes:
        """Events that come before any text; of the usage, the prompt's part is known."""
        ...

    def push(self, delta: ChoiceDelta) -> bytes:
        """Take in one choice's news; returns its events."""
        ...

    def closing(self, usage: GenerationUsage) -> bytes:
        """Events that end a stream whose choices are all finished."""
        ...

    def finish(self, usage: GenerationUsage) -> bytes:
        """The answer that the pushed deltas make, in one piece, as JSON; all choices are finished."""
        ...


@dataclass(frozen=True, slots=True)
class StreamPolicy:
    """Pace of a response.

    Attributes:
        interval_tokens: Tokens in one event, the first token and the last ones excepted.
        keepalive_s: Silence after which a comment line is sent.
        pause: Returns what the model does while another one has its turn, and None while it computes.
        snapshot: Returns the newest counts of the model's engine.
        clock: Says how old these are.
    """

    interval_tokens: int
    keepalive_s: float
    pause: Callable[[], str | None]
    snapshot: Callable[[], LoopSnapshot]
    clock: Clock


class GenerationResponse:
    """An ASGI application that answers one request with a generation, and owns it."""

    def __init__(
        self,
        generation: Generation,
        dialect: Dialect,
        policy: StreamPolicy,
        *,
        is_stream: bool,
        notes: Sequence[tuple[bytes, bytes]] = (),
        tell_progress: TellProgress | None = None,
    ) -> None:
        """Take over an open generation, which is closed here.

        Args:
            generation: To answer with.
            dialect: Writes the answer.
            policy: Its pace.
            is_stream: Whether it is sent while it is generated.
            notes: Headers of this answer.
            tell_progress: Writes an event of the prompt's progress; None if the client does not ask for that.
        """
        self._generation = generation
        self._told = None if tell_progress is None else ToldProgress(tell_progress)
        self._dialect = dialect
        self._policy = policy
        self._is_stream = is_stream
        self._notes = notes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and let go of the generation whatever happens.

        Raises:
            MachdError: The generation failed before the response had started.
        """
        error: MachdError | None = None
        write = self._write_events if self._is_stream else self._write_whole
        writer = asyncio.create_task(write(_Sender(send)))
        watcher = asyncio.create_task(departed(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            connection_of(scope).check_stalled()
            if writer.done():
                writer.result()
        except ClientStalledError as stalled:
            error = stalled
            connection_of(scope).abort()
            await asyncio.sleep(0)  # let the server note that the connection is gone
        except MachdError as failed:
            error = failed
            raise
        except ENDINGS:
            raise
        except BaseException as bug:
            # One row's detokeniser, say, which may be a library's code: the fault of that row alone.
            structlog.get_logger("machd.http").error("row.failed", exc_info=bug)
            error = RowFaultError(_ROW_FAULT)
            raise error from bug
        finally:
            self._generation.close(error)
            for task in (writer, watcher):
                task.cancel()

    async def _write_whole(self, sender: _Sender) -> None:
        gained: dict[int, list[ChoiceDelta]] = {}
        async for batch in self._generation.deltas(idle_s=self._policy.keepalive_s):
            for delta in batch:
                gained.setdefault(delta.index, []).append(delta)
        for _, deltas in sorted(gained.items()):
            # Merged, so that few frames are encoded in vain.
            self._dialect.push(merge_deltas(deltas))
        body = self._dialect.finish(self._generation.usage)
        await sender.start(
            [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *_mode_headers(await self._generation.admitted()),
                *_diagnosis_headers(self._generation),
                *self._notes,
            ]
        )
        await sender.send(body)
        # A write of its own, because only the next one waits for a client that does not read.
        await sender.send(b"", is_last=True)

    async def _write_events(self, sender: _Sender) -> None:
        try:
            await self._send_deltas(sender)
            ending = self._dialect.closing(self._generation.usage)
        except ClientStalledError:
            raise
        except MachdError as error:
            if not sender.has_started:
                raise
            ending = self._dialect.failure(error)
        except ENDINGS:
            raise
        except BaseException as error:
            if not sender.has_started:
                raise
            structlog.get_logger("machd.http").error("row.failed", exc_info=error)
            fault = RowFaultError(_ROW_FAULT)
            self._generation.close(fault)
            ending = self._dialect.failure(fault)
        await sender.send(ending, is_last=True)

    async def _send_deltas(self, sender: _Sender) -> None:
        pacer, is_open = Pacer(self._policy.interval_tokens), False
        admission = await self._admitted(sender)
        sender.note_sent()
        try:
            async for batch in self._generation.deltas(idle_s=self._look_s):
                progress, is_silent = self._progress(), self._is_silent(sender, batch)
                if not is_open and (batch or progress or is_silent):
                    # Not before there is news, so that a failing prefill still gets its status.
                    await self._open(sender, admission)
                    is_open = True
                frames = progress + self._frames(pacer.due(batch))
                if not frames and is_silent:
                    frames = keep_alive(self._dialect, self._doing())
                if frames:
                    await sender.send(frames)
        except ClientStalledError:
            raise
        except MachdError:
            if frames := self._frames(pacer.rest()):
                await sender.send(frames)
            raise

    @property
    def _look_s(self) -> float:
        """Seconds without events after which the stream is looked at."""
        keepalive_s = self._policy.keepalive_s
        return keepalive_s if self._told is None else min(keepalive_s, LOOK_S)

    def _is_silent(self, sender: _Sender, batch: Sequence[ChoiceDelta]) -> bool:
        """Return whether it is time for a keep-alive: events of which nothing is sent do not count."""
        # Without looks in between, there were no events for that long; a timer may be early by a hair.
        is_idle = not batch and self._look_s == self._policy.keepalive_s
        return is_idle or sender.silent_s >= self._policy.keepalive_s

    async def _open(self, sender: _Sender, admission: SequenceAdmitted) -> None:
        diagnosis = _diagnosis_headers(self._generation)
        await self._start_events(sender, [*_mode_headers(admission), *diagnosis])
        if opening := self._dialect.opening(self._generation.usage):
            await sender.send(opening)

    def _progress(self) -> bytes:
        """Events that tell how far the prompt is, if the client asks for them and there is news."""
        if self._told is None or self._told.is_done:
            return b""
        return self._told.due(self._prefill(self._policy.snapshot()))

    def _prefill(self, snapshot: LoopSnapshot) -> PrefillProgress:
        running = snapshot.prefilled_tokens
        return prefill_progress(self._generation, running, snapshot, self._policy.clock)

    def _doing(self) -> str:
        """What the generation does, if it has no token yet or waits to go on; else nothing."""
        snapshot = self._policy.snapshot()
        match phase_of(self._generation, snapshot.prefilled_tokens, snapshot):
            case "waiting":
                return "waiting"
            case "prefill" if self._is_counted(snapshot):
                return str(self._prefill(snapshot))
            case "prefill":
                return ""  # what ended it is on its way
            case "decode":
                return ""

    def _is_counted(self, snapshot: LoopSnapshot) -> bool:
        return any(one in snapshot.prefilled_tokens for one in self._generation.open_sequences)

    def _frames(self, deltas: Iterable[ChoiceDelta]) -> bytes:
        return b"".join(self._dialect.push(delta) for delta in deltas)

    async def _admitted(self, sender: _Sender) -> SequenceAdmitted:
        """Wait for a slot; where the model is suspended, the stream begins and gets keep-alive frames meanwhile."""
        waiting = asyncio.create_task(self._generation.admitted())
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=self._policy.keepalive_s)
                if done:
                    return waiting.result()
                if (state := self._policy.pause()) is not None:
                    headers = [state_header(state), *_diagnosis_headers(self._generation)]
                    await self._start_events(sender, headers)
                    await sender.send(keep_alive(self._dialect, f"waiting, model {state}"))
        finally:
            waiting.cancel()

    async def _start_events(self, sender: _Sender, headers: _Headers) -> None:
        if not sender.has_started:
            await sender.start([*stream_headers(self._dialect), *headers, *self._notes])


def stream_headers(shape: StreamShape) -> _Headers:
    """Headers of every stream."""
    return [
        (b"content-type", shape.media_type),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]


def state_header(state: str) -> tuple[bytes, bytes]:
    """The header of a stream that begins while its model is not ready."""
    return b"x-model-state", state.encode()


def keep_alive(shape: StreamShape, said: str) -> bytes:
    """Return the frame that keeps a stream alive, with a few words for a person where the stream has comments."""
    frame = shape.keep_alive
    if not said or shape.media_type != EVENT_STREAM:
        return frame
    return comment(said) if frame == COMMENT_KEEP_ALIVE else frame + comment(said)


class _Sender:
    """ASGI's ``send``, whether a response has started, and since when nothing was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._now_s = asyncio.get_running_loop().time
        self._sent_s = self._now_s()
        self.has_started = False

    @property
    def silent_s(self) -> float:
        """Seconds since something was sent."""
        return self._now_s() - self._sent_s

    def note_sent(self) -> None:
        """Count the silence from now on."""
        self._sent_s = self._now_s()

    async def start(self, headers: _Headers) -> None:
        self.has_started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def send(self, body: bytes, *, is_last: bool = False) -> None:
        self.note_sent()
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
        # Neither sending nor taking has to wait while there is a backlog; others want their turn,
        # and so does the watcher that sees this client leave.
        await asyncio.sleep(0)


def _mode_headers(admission: SequenceAdmitted) -> _Headers:
    headers = [
        (b"x-decode-mode", admission.decode_mode.value.encode()),
        (b"x-active-loops", str(admission.active_loops).encode()),
    ]
    if admission.coalesced_with is not None:
        headers.append((b"x-coalesced", admission.coalesced_with.encode()))
    return headers


def _diagnosis_headers(generation: Generation) -> _Headers:
    """A structured field: a reason with parameters; none where there is nothing to tell.

    Where an answer begins before its prompt was looked up, the reason is ``unknown``, and left out unless rules took something
    out of the prompt.
    """
    diagnosis, rules = generation.diagnosis, generation.applied_rules
    said = [_UNKNOWN]
    if diagnosis is not None:
        said = [
            str(diagnosis.client_reason),
            f"cached_tokens={diagnosis.cached_tokens}",
            f"parted_at_tokens={diagnosis.parted_at_tokens}",
        ]
    elif not rules:
        return []
    if rules:
        said.append(f"normalised={'+'.join(rules)}")
    return [(b"x-cache-diagnosis", "; ".join(said).encode())]


_T = TypeVar("_T")


async def departed(receive: Receive) -> None:
    """Return when the client has left; only once the whole body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[object, object, _T]) -> _T:
    """Do ``work``; when the client leaves, cancel it and raise ClientDisconnectedError."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(departed(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnectedError("the client has left")
    finally:
        for task in (worker, watcher):
            task.cancel()
