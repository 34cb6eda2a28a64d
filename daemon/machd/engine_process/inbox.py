"""Messages to the engine thread, drained once a step, and config changes without an answer yet."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field

from machd.errors import MachdError
from machd.scheduler.subscriber import SequenceRequest
from machd.settings.model import Settings


@dataclass(frozen=True, slots=True)
class Submit:
    """Start the sequences of one request."""

    requests: tuple[SequenceRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort sequences; ``error`` is None if their client needs no more tokens."""

    sequence_ids: tuple[str, ...]
    error: MachdError | None


@dataclass(frozen=True, slots=True)
class ChangeConfig:
    """Change the scheduler config; running sequences are suspended for it.

    Attributes:
        settings: The settings of the new config.
        is_measured: Whether the model is measured before.
        done: Resolves when the change is applied or has failed.
    """

    settings: Settings
    is_measured: bool
    done: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        """Shield ``done``: a waiter that leaves must not cancel it for the others."""
        self.done.set_running_or_notify_cancel()

    def answer(self, error: Exception | None) -> None:
        """Resolve ``done``, on any thread. The first answer counts."""
        with suppress(InvalidStateError):
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Apply other limits to new, waiting and running requests, to the prefix cache and to stored answers."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class ClearPrefixes:
    """Drop the unused blocks of the prefix cache.

    Attributes:
        is_disk_included: Whether the disk tier is emptied, too.
        done: Resolves to the number of dropped blocks.
    """

    is_disk_included: bool
    done: Future[int] = field(default_factory=Future)

    def __post_init__(self) -> None:
        """Shield ``done``: a waiter that leaves must not cancel it."""
        self.done.set_running_or_notify_cancel()


@dataclass(frozen=True, slots=True)
class Stop:
    """End everything with ``error`` and leave the thread."""

    error: MachdError


Message = Submit | Abort | ChangeConfig | SetLimits | ClearPrefixes | Stop


class Inbox:
    """A queue that any thread may put into and the engine thread empties, for as long as it runs.

    It needs no bound of its own: a request puts one Submit and an Abort or two for each of its
    sequences, requests are bounded by ``limits.max_in_flight``, operators change settings one change
    at a time, and each drain leaves it empty.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        """Add a message; never blocks."""
        self._queue.put(message)

    def drain(self, *, wait_s: float) -> list[Message]:
        """Return all messages; if there is none, wait up to ``wait_s`` seconds for one."""
        messages: list[Message] = []
        try:
            messages.append(self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait())
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages


class OpenChanges:
    """Config changes without an answer yet, readable from any thread.

    The engine thread may be measuring, or hang, when the daemon stops. :meth:`refuse` then answers in
    its place, and a later answer of that thread has no effect.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._changes: list[ChangeConfig] = []
        self._end_error: MachdError | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether every change is answered."""
        with self._lock:
            return all(one.done.done() for one in self._changes)

    def add(self, change: ChangeConfig) -> None:
        """Add a change until it is answered; after :meth:`refuse` it fails at once."""
        with self._lock:
            self._changes = [one for one in self._changes if not one.done.done()]
            self._changes.append(change)
            error = self._end_error
        if error is not None:
            change.answer(error)

    def refuse(self, error: MachdError) -> None:
        """Fail all changes, and later ones; the first call counts."""
        with self._lock:
            if self._end_error is None:
                self._end_error = error
            error, changes = self._end_error, self._changes
            self._changes = []
        for one in changes:  # not under the lock: a callback may request another change
            one.answer(error)
