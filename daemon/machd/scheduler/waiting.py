"""The bounded queue of sequences that wait for a slot, by the time they count as having come."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from machd.errors import QueueFullError
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import Subscriber

_MAX_RETRY_AFTER_S = 600
_SERVICE_TIME_WEIGHT = 0.2
"""How much the newest decode counts in the moving average of service times."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait, and for how long.

    Attributes:
        max_queue: Sequences; sequences that share one count once.
        max_queue_tokens: Their prompt tokens, together.
        queue_timeout_s: Seconds until a waiting sequence is turned away.
        request_timeout_s: Seconds from arrival until a running sequence is ended.
    """

    max_queue: int
    max_queue_tokens: int
    queue_timeout_s: float
    request_timeout_s: float


class WaitingQueue:
    """Who waits, in the order of :attr:`Decode.place`, bounded in number and in prompt tokens."""

    def __init__(self, limits: QueueLimits, *, slot_count: int = 1) -> None:
        """Start empty, in front of so many slots."""
        self._limits = limits
        self._slot_count = slot_count
        self._sequences: dict[int, Sequence] = {}
        self._prompt_tokens = 0
        self._service_time_s = 0.0

    def set_bounds(self, limits: QueueLimits, *, slot_count: int) -> None:
        """Hold whoever comes against other limits, in front of so many slots.

        Nobody who waits is turned away because there is less room now, but for having waited longer
        than the new limits allow.
        """
        self._limits = limits
        self._slot_count = slot_count

    def __len__(self) -> int:
        """Sequences that wait."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Who is next first."""
        return iter(sorted(self._sequences.values(), key=lambda sequence: sequence.place))

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether that sequence waits."""
        return sequence.number in self._sequences

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return self._prompt_tokens

    @property
    def subscriber_count(self) -> int:
        """Sequences that wait, those that share a sequence included."""
        return sum(len(sequence.subscribers) for sequence in self._sequences.values())

    @property
    def first(self) -> Sequence:
        """Who is next."""
        return min(self._sequences.values(), key=lambda sequence: sequence.place)

    @property
    def oldest_s(self) -> float:
        """When the one that is here longest was submitted."""
        return min(sequence.submitted_s for sequence in self._sequences.values())

    def check_room(self, sequences: tuple[Sequence, ...], *, free_slots: int) -> None:
        """Refuse a request's sequences unless all of them fit; free slots do not count as queue.

        Raises:
            QueueFullError: With the seconds after which room is likely.
        """
        if not sequences:
            return
        waiting = len(self) + len(sequences) - free_slots
        if waiting > self._limits.max_queue:
            raise QueueFullError(
                f"{len(self)} completions are waiting and limits.max_queue is "
                f"{self._limits.max_queue}; try again later",
                retry_after_s=self.retry_after_s(),
            )
        prompt_tokens = sum(sequence.prompt_tokens for sequence in sequences)
        if waiting > 0 and self._prompt_tokens + prompt_tokens > self._limits.max_queue_tokens:
            raise QueueFullError(
                f"{self._prompt_tokens} prompt tokens are waiting and limits.max_queue_tokens is "
                f"{self._limits.max_queue_tokens}; try again later",
                retry_after_s=self.retry_after_s(),
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        assert sequence not in self, "a sequence queues once"
        self._sequences[sequence.number] = sequence
        self._prompt_tokens += sequence.prompt_tokens

    def position(self, sequence: Sequence) -> int:
        """How many are in front of it."""
        place = sequence.place
        return sum(other.place < place for other in self._sequences.values())

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        del self._sequences[sequence.number]
        self._prompt_tokens -= sequence.prompt_tokens

    def expired(self, now_s: float) -> tuple[Subscriber, ...]:
        """Those that have waited too long to be worth starting, in order."""
        if not any(self._expires_s(one) <= now_s for one in self._subscribers()):
            return ()  # sorting is for the rare case
        return tuple(
            one
            for sequence in self
            for one in sequence.subscribers
            if self._expires_s(one) <= now_s
        )

    def next_expiry_s(self) -> float:
        """When somebody will have waited too long; nobody else comes sooner."""
        return min((self._expires_s(one) for one in self._subscribers()), default=math.inf)

    def start_group(self, group_id: str) -> None:
        """Note that a request's first sequence has been admitted."""
        for subscriber in self._subscribers():
            if subscriber.request.group_id == group_id:
                subscriber.is_group_started = True

    def record_service_time(self, seconds_s: float) -> None:
        """Learn how long a sequence keeps a slot, for :meth:`retry_after_s`."""
        if self._service_time_s == 0.0:
            self._service_time_s = seconds_s
        self._service_time_s += _SERVICE_TIME_WEIGHT * (seconds_s - self._service_time_s)

    def retry_after_s(self) -> int:
        """Whole seconds until the queue is likely to have moved by one, from what was measured.

        With several slots one of them falls free that much more often.
        """
        seconds_s = self._service_time_s / self._slot_count
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(seconds_s)))

    def _subscribers(self) -> Iterator[Subscriber]:
        return (one for sequence in self._sequences.values() for one in sequence.subscribers)

    def _expires_s(self, subscriber: Subscriber) -> float:
        """A request whose first sequence was admitted no longer waits in the queue's sense."""
        limits = self._limits
        patience_s = limits.request_timeout_s
        if not subscriber.is_group_started:
            patience_s = min(patience_s, limits.queue_timeout_s)
        return subscriber.request.arrived_s + patience_s
