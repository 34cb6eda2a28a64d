"""The bounded queue of sequences that wait for a slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from machd.errors import MachdError, QueueFullError, QueueTimeoutError, RequestTimeoutError
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import Subscriber, SubscriberState

_MAX_RETRY_AFTER_S = 600


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue, and timeouts.

    Attributes:
        max_queue: Most waiting sequences.
        max_queue_tokens: Most prompt tokens of waiting sequences together.
        queue_timeout_s: Seconds from arrival until a waiting request fails.
        request_timeout_s: Seconds from arrival until a request fails, waiting or running.
    """

    max_queue: int
    max_queue_tokens: int
    queue_timeout_s: float
    request_timeout_s: float


class WaitingQueue:
    """Waiting sequences in order of :attr:`Sequence.place`, bounded in number and prompt tokens."""

    def __init__(
        self, limits: QueueLimits, departure_s: Callable[[int], float] = lambda _count: 0.0
    ) -> None:
        """Start empty; ``departure_s`` forecasts the seconds until so many sequences have left their slots."""
        self._limits = limits
        self._departure_s = departure_s
        self._sequences: dict[int, Sequence] = {}
        self._prompt_tokens = 0

    def set_limits(self, limits: QueueLimits) -> None:
        """Apply other limits to later requests.

        Waiting sequences beyond a smaller bound stay, but new timeouts apply to them.
        """
        self._limits = limits

    def __len__(self) -> int:
        """Count the waiting sequences."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield sequences in queue order."""
        return iter(sorted(self._sequences.values(), key=lambda sequence: sequence.place))

    def __contains__(self, sequence: Sequence) -> bool:
        """Return True if the sequence waits."""
        return sequence.number in self._sequences

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all waiting sequences."""
        return self._prompt_tokens

    @property
    def subscriber_count(self) -> int:
        """Subscribers of all waiting sequences."""
        return sum(len(sequence.subscribers) for sequence in self._sequences.values())

    def first_but(self, passed: Collection[Sequence]) -> Sequence | None:
        """Return the next sequence that is not one of ``passed``; None if there is none."""
        others = (one for one in self._sequences.values() if one not in passed)
        return min(others, key=lambda sequence: sequence.place, default=None)

    @property
    def suspect(self) -> Sequence | None:
        """The next suspect, which is to run alone; None if there is none."""
        suspects = [one for one in self._sequences.values() if one.is_suspect]
        return min(suspects, key=lambda sequence: sequence.place, default=None)

    @property
    def suspended(self) -> list[Sequence]:
        """Sequences that had a slot, or whose engine process had one for them."""
        return [one for one in self._sequences.values() if one.suspended_for is not None]

    @property
    def oldest_s(self) -> float:
        """Earliest submission of a waiting sequence."""
        return min(sequence.submitted_s for sequence in self._sequences.values())

    def check_room(self, sequences: tuple[Sequence, ...], *, free_slots: int) -> None:
        """Refuse a request's sequences unless all fit into the queue and the free slots.

        Raises:
            QueueFullError: They do not fit.
        """
        if not sequences:
            return
        now_s, limits = sequences[0].submitted_s, self._limits
        waiting = len(self) + len(sequences) - free_slots
        if waiting > limits.max_queue:
            raise QueueFullError(
                f"{len(self)} completions are waiting and limits.max_queue is "
                f"{limits.max_queue}; try again later",
                retry_after_s=self._retry_after_s(waiting - limits.max_queue, now_s),
            )
        prompt_tokens = sum(sequence.prompt_tokens for sequence in sequences)
        if waiting > 0 and self._prompt_tokens + prompt_tokens > limits.max_queue_tokens:
            more_tokens = self._prompt_tokens + prompt_tokens - limits.max_queue_tokens
            raise QueueFullError(
                f"{self._prompt_tokens} prompt tokens are waiting and limits.max_queue_tokens is "
                f"{limits.max_queue_tokens}; try again later",
                retry_after_s=self._retry_after_s(self._departures_for(more_tokens), now_s),
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        assert sequence not in self, "a sequence queues once"
        self._sequences[sequence.number] = sequence
        self._prompt_tokens += sequence.prompt_tokens

    def position(self, sequence: Sequence) -> int:
        """Count the sequences in front of one."""
        place = sequence.place
        return sum(other.place < place for other in self._sequences.values())

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from any position."""
        del self._sequences[sequence.number]
        self._prompt_tokens -= sequence.prompt_tokens

    def expired(self, now_s: float) -> tuple[Subscriber, ...]:
        """Return timed-out subscribers in queue order."""
        if not any(self._expires_s(one) <= now_s for one in self._subscribers()):
            return ()  # saves the sort in the common case
        return tuple(
            one
            for sequence in self
            for one in sequence.subscribers
            if self._expires_s(one) <= now_s
        )

    def timed_out(
        self, running: Iterable[Sequence], now_s: float
    ) -> list[tuple[Subscriber, MachdError]]:
        """Return timed-out subscribers with their errors: waiting ones in queue order, then running."""
        late = [
            (one, self._request_timeout() if one.is_group_started else self._queue_timeout())
            for one in self.expired(now_s)
        ]
        oldest_s = now_s - self._limits.request_timeout_s
        return late + [
            (one, self._request_timeout())
            for sequence in running
            for one in sequence.subscribers
            if one.request.arrived_s <= oldest_s
        ]

    def next_expiry_s(self) -> float:
        """Return the time of the next timeout; inf if nothing waits."""
        return min((self._expires_s(one) for one in self._subscribers()), default=math.inf)

    def start_group(self, group_id: str) -> None:
        """Exempt a request from the queue timeout after one of its sequences was admitted."""
        for subscriber in self._subscribers():
            if subscriber.request.group_id == group_id:
                subscriber.is_group_started = True

    def retry_after_s(self) -> int:
        """Forecast the whole seconds until a sequence leaves its slot, within bounds."""
        return _whole_seconds(self._departure_s(1))

    def check_invariants(self) -> None:
        """Assert that no sequence runs, and that the queued tokens add up."""
        for sequence in self:
            assert not sequence.is_running, "a running sequence waits"
            sequence.check_subscribers(SubscriberState.WAITING)
        prompt_tokens = sum(sequence.prompt_tokens for sequence in self)
        assert prompt_tokens == self._prompt_tokens, "queued tokens do not add up"

    def _subscribers(self) -> Iterator[Subscriber]:
        return (one for sequence in self._sequences.values() for one in sequence.subscribers)

    def _expires_s(self, subscriber: Subscriber) -> float:
        """Time of a subscriber's timeout; the queue timeout ends with its group's first admission."""
        limits = self._limits
        patience_s = limits.request_timeout_s
        if not subscriber.is_group_started:
            patience_s = min(patience_s, limits.queue_timeout_s)
        return subscriber.request.arrived_s + patience_s

    def _retry_after_s(self, count: int, now_s: float) -> int:
        """Forecast the whole seconds until so many sequences have left the queue, for a slot or at their timeout."""
        expiries_s = sorted(self._expires_s(one) for one in self._subscribers())[:count]
        expired_s = expiries_s[-1] - now_s if expiries_s else math.inf
        return _whole_seconds(min(self._departure_s(count), expired_s))

    def _departures_for(self, tokens: int) -> int:
        """Count the sequences in front that have so many prompt tokens together; all if they have fewer."""
        count = 0
        for count, sequence in enumerate(self, start=1):  # noqa: B007 - the last one counts
            tokens -= sequence.prompt_tokens
            if tokens <= 0:
                break
        return max(1, count)

    def _queue_timeout(self) -> MachdError:
        return QueueTimeoutError(
            "no slot became free within limits.queue_timeout_s "
            f"({self._limits.queue_timeout_s:g} s)",
            retry_after_s=self.retry_after_s(),
        )

    def _request_timeout(self) -> MachdError:
        return RequestTimeoutError(
            "the request ran longer than limits.request_timeout_s "
            f"({self._limits.request_timeout_s:g} s)"
        )


def _whole_seconds(seconds_s: float) -> int:
    return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(seconds_s)))
