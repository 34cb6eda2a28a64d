"""The one way into the engine thread: messages, drained once a step."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from machd.errors import MachdError
from machd.scheduler.sequence import SequenceRequest

__all__ = ["Abort", "Inbox", "Message", "Stop", "Submit"]


@dataclass(frozen=True, slots=True)
class Submit:
    """Start the sequences of one request."""

    requests: tuple[SequenceRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End sequences; ``error`` is None when their client simply has enough."""

    sequence_ids: tuple[str, ...]
    error: MachdError | None


@dataclass(frozen=True, slots=True)
class Stop:
    """End everything with ``error`` and leave the thread."""

    error: MachdError


Message = Submit | Abort | Stop


class Inbox:
    """A queue that any thread may put into and the engine thread alone empties.

    It needs no bound of its own: a request puts one Submit and an Abort or two for each of its
    sequences, requests are bounded by ``limits.max_in_flight``, and each drain leaves it empty.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        """Leave a message; never blocks."""
        self._queue.put(message)

    def drain(self, *, wait_s: float) -> list[Message]:
        """Everything that lies there; if nothing does, wait up to ``wait_s`` seconds for one."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait())
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages
