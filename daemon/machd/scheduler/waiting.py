"""The bounded queue of sequences that wait for a slot, first come, first served."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from machd.errors import QueueFullError
from machd.scheduler.sequence import Sequence

__all__ = ["QueueLimits", "WaitingQueue"]

_MAX_RETRY_AFTER_S = 600
_SERVICE_TIME_WEIGHT = 0.2
"""How much the newest sequence counts in the moving average of service times."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait, and for how long.

    Attributes:
        max_queue: Sequences.
        max_queue_tokens: Their prompt tokens, together.
        queue_timeout_s: Seconds until a waiting sequence is turned away.
        request_timeout_s: Seconds from arrival until a running sequence is ended.
    """

    max_queue: int
    max_queue_tokens: int
    queue_timeout_s: float
    request_timeout_s: float


class WaitingQueue:
    """Sequences in arrival order, bounded in number and in prompt tokens."""

    def __init__(self, limits: QueueLimits) -> None:
        """Start empty."""
        self._limits = limits
        self._sequences: OrderedDict[str, Sequence] = OrderedDict()
        self._prompt_tokens = 0
        self._service_time_s = 0.0

    def __len__(self) -> int:
        """Sequences that wait."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """In arrival order."""
        return iter(self._sequences.values())

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return self._prompt_tokens

    def check_room(self, sequences: tuple[Sequence, ...], *, free_slots: int) -> None:
        """Refuse a request's sequences unless all of them fit; free slots do not count as queue.

        Raises:
            QueueFullError: With the seconds after which room is likely.
        """
        waiting = len(self) + len(sequences) - free_slots
        if waiting > self._limits.max_queue:
            raise QueueFullError(
                f"{len(self)} completions are waiting and limits.max_queue is "
                f"{self._limits.max_queue}; try again later",
                retry_after_s=self.retry_after_s(),
            )
        prompt_tokens = sum(len(sequence.request.prompt) for sequence in sequences)
        if waiting > 0 and self._prompt_tokens + prompt_tokens > self._limits.max_queue_tokens:
            raise QueueFullError(
                f"{self._prompt_tokens} prompt tokens are waiting and limits.max_queue_tokens is "
                f"{self._limits.max_queue_tokens}; try again later",
                retry_after_s=self.retry_after_s(),
            )

    def append(self, sequence: Sequence) -> int:
        """Queue a sequence; returns how many are in front of it."""
        assert sequence.sequence_id not in self._sequences, "sequence ids are unique"
        position = len(self)
        self._sequences[sequence.sequence_id] = sequence
        self._prompt_tokens += len(sequence.request.prompt)
        return position

    def pop_first(self) -> Sequence:
        """Take the one that has waited longest."""
        return self.remove(next(iter(self._sequences)))

    def remove(self, sequence_id: str) -> Sequence:
        """Take a sequence out, wherever it stands."""
        sequence = self._sequences.pop(sequence_id)
        self._prompt_tokens -= len(sequence.request.prompt)
        return sequence

    def __contains__(self, sequence_id: str) -> bool:
        """Whether that sequence waits."""
        return sequence_id in self._sequences

    def expired(self, now_s: float) -> tuple[Sequence, ...]:
        """Those that have waited too long to be worth starting.

        A request whose first sequence was admitted in time no longer waits in the queue's sense.
        """
        limits = self._limits
        patience_s = min(limits.queue_timeout_s, limits.request_timeout_s)
        return tuple(
            sequence
            for sequence in self
            if now_s - sequence.request.arrived_s
            >= (limits.request_timeout_s if sequence.is_group_started else patience_s)
        )

    def start_group(self, group_id: str) -> None:
        """Note that a request's first sequence has been admitted."""
        for sequence in self:
            if sequence.request.group_id == group_id:
                sequence.is_group_started = True

    def record_service_time(self, seconds_s: float) -> None:
        """Learn how long a sequence keeps a slot, for :meth:`retry_after_s`."""
        if self._service_time_s == 0.0:
            self._service_time_s = seconds_s
        self._service_time_s += _SERVICE_TIME_WEIGHT * (seconds_s - self._service_time_s)

    def retry_after_s(self) -> int:
        """Whole seconds until the queue is likely to have moved by one, from what was measured."""
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self._service_time_s)))
