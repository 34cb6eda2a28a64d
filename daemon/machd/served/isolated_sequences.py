"""Sequences that an engine process computes one at a time, to find the one that crashes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from machd.scheduler.subscriber import SequenceRequest
from machd.served.open_sequences import OpenSequences


class IsolatedSequences:
    """A queue whose next sequence is sent once the one before has ended. Its owner's lock guards it."""

    def __init__(self, sequences: OpenSequences) -> None:
        """Begin with none; of ``sequences``, those that have ended are left out when it is their turn."""
        self._sequences = sequences
        self._held: deque[SequenceRequest] = deque()
        self._sent_id: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether new sequences have to queue here too."""
        return self._sent_id is not None

    @property
    def held_ids(self) -> frozenset[str]:
        """Ids of the sequences that are not sent yet."""
        return frozenset(one.sequence_id for one in self._held)

    def hold(self, requests: Iterable[SequenceRequest]) -> None:
        """Queue sequences behind those that are held already."""
        self._held.extend(requests)

    def clear(self) -> None:
        """Drop all: their process has ended."""
        self._held.clear()
        self._sent_id = None

    def take_next(self) -> SequenceRequest | None:
        """Return the sequence to send now; None while the one before has not ended, and once all have."""
        if self._sent_id in self._sequences:
            return None
        self._sent_id = None
        while self._held:
            request = self._held.popleft()
            if request.sequence_id in self._sequences:  # not aborted while it was held
                self._sent_id = request.sequence_id
                return request
        return None
