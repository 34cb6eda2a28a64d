"""Delivery of a step's events to the streams of requests, with one wake-up of the event loop.

The engine thread calls :meth:`Fanout.publish`; all else happens on the event loop. A client that reads
slowly gets all tokens since its last read at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Protocol

from machd.engine.protocol.step import SampledToken
from machd.errors import ClientStalledError, MachdError
from machd.scheduler.events import (
    Event,
    OutputGenerated,
    PromptLookedUp,
    SequenceAdmitted,
    SequenceFinished,
    SequenceStarted,
)

MAX_PENDING_EVENTS = 16_384
"""Events that one client may leave unread before it counts as stalled."""

MAX_TAKEN_EVENTS = 512
"""Events that one ``take`` returns, so that writing them never blocks the event loop for long."""

SequenceEvent = (
    SequenceAdmitted | PromptLookedUp | SequenceStarted | OutputGenerated | SequenceFinished
)


class EventObserver(Protocol):
    """A receiver of every event, called on the event loop."""

    def on_events(self, events: Sequence[Event]) -> None:
        """Receive a step's events; must be quick and must not raise."""
        ...


class Stream:
    """The unread events of one request's sequences.

    Attributes:
        ended_sequences: Those that the engine has done with, whether or not their client has read that.
    """

    def __init__(self) -> None:
        """Start empty and open."""
        self._pending: list[SequenceEvent] = []
        self._error: MachdError | None = None
        self._wake = asyncio.Event()
        self._is_admitted = False
        self._running_tokens: dict[str, int] = {}
        self._finished_tokens = 0
        self.ended_sequences: set[str] = set()

    @property
    def is_admitted(self) -> bool:
        """Return whether any of the sequences has had a slot."""
        return self._is_admitted

    @property
    def completion_tokens(self) -> int:
        """Return the number of tokens generated for the sequences, read by the client or not."""
        return self._finished_tokens + sum(self._running_tokens.values())

    def push(self, event: SequenceEvent) -> None:
        """Add an event, unless the stream has failed."""
        self._count(event)
        if self._error is not None:
            return
        if len(self._pending) >= MAX_PENDING_EVENTS:
            self.fail(ClientStalledError(f"{MAX_PENDING_EVENTS} events were left unread"))
            return
        self._pending.append(event)
        self._wake.set()

    def fail(self, error: MachdError) -> None:
        """End the stream with an error, after what is pending."""
        self._error = self._error or error
        self._wake.set()

    async def take(self) -> list[SequenceEvent]:
        """Return the unread events, at least one and at most ``MAX_TAKEN_EVENTS``.

        Raises:
            MachdError: The stream failed, and all before that has been read.
        """
        await self._wake.wait()
        self._wake.clear()
        events = self._pending[:MAX_TAKEN_EVENTS]
        self._pending = self._pending[MAX_TAKEN_EVENTS:]
        if self._pending or self._error is not None:
            self._wake.set()
        if not events:
            assert self._error is not None, "a stream wakes only for an event or an error"
            raise self._error
        return events

    def _count(self, event: SequenceEvent) -> None:
        match event:
            case OutputGenerated(sequence_id, SampledToken()):
                self._running_tokens[sequence_id] = self._running_tokens.get(sequence_id, 0) + 1
            case SequenceAdmitted():
                self._is_admitted = True
            case SequenceFinished(sequence_id):
                # A final stop token was generated as well, without an event of its own.
                generated = self._running_tokens.pop(sequence_id, 0)
                self._finished_tokens += max(generated, event.completion_tokens)
                self.ended_sequences.add(sequence_id)
            case OutputGenerated() | PromptLookedUp() | SequenceStarted():
                pass


class Fanout:
    """The streams of each sequence. Owned by the event loop; only ``publish`` may come from elsewhere."""

    def __init__(
        self, event_loop: asyncio.AbstractEventLoop, observers: Sequence[EventObserver] = ()
    ) -> None:
        """Deliver on ``event_loop``."""
        self._event_loop = event_loop
        self._observers = tuple(observers)
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()
        self._undelivered: list[Event] = []
        self._is_waking = False

    def __len__(self) -> int:
        """Return the number of sequences that have a stream."""
        return len(self._streams)

    def publish(self, events: list[Event]) -> None:
        """Deliver a step's events with at most one wake-up.

        While a wake-up is on its way, the events of further steps join it: an engine that is
        faster than the event loop cannot flood it. Events for an event loop that has closed are
        dropped; that is no fault of the engine's.
        """
        with self._lock:
            self._undelivered.extend(events)
            is_awake, self._is_waking = self._is_waking, True
        if is_awake:
            return
        try:
            self._event_loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            if not self._event_loop.is_closed():
                raise

    def open(self, sequence_ids: Sequence[str]) -> Stream:
        """Open one stream for all sequences of a request."""
        stream = Stream()
        for sequence_id in sequence_ids:
            assert sequence_id not in self._streams, "sequence ids are unique"
            self._streams[sequence_id] = stream
        return stream

    def close(self, sequence_ids: Sequence[str]) -> None:
        """Drop the streams of these sequences."""
        for sequence_id in sequence_ids:
            self._streams.pop(sequence_id, None)

    def _deliver(self) -> None:
        with self._lock:
            events, self._undelivered = self._undelivered, []
            self._is_waking = False
        for event in events:
            if isinstance(event, SequenceEvent):
                stream = self._streams.get(event.sequence_id)
                if stream is not None:
                    stream.push(event)
        for observer in self._observers:
            observer.on_events(events)
