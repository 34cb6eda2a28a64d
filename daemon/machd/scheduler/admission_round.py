"""One round of admission: the order in which waiting sequences get slots.

A sequence is admitted once its adapters are in memory. Until then others pass it, so that no slot is idle while
adapters load.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from machd.engine.protocol.adapters import Holding
from machd.errors import AdapterError
from machd.scheduler.running import RunningSequences
from machd.scheduler.sequence import Sequence
from machd.scheduler.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting sequence that is next to leave the queue.

    Attributes:
        refusal: Reason to end it; None if its adapters are held, and it can be admitted.
    """

    sequence: Sequence
    refusal: AdapterError | None = None


class AdmissionRound:
    """Candidates of one round, each found once, while some sequences are passed by others.

    Where there is no room for the adapters of a sequence, only sequences without adapters pass it: others would keep
    theirs in use for ever.
    """

    def __init__(self, waiting: WaitingQueue, running: RunningSequences) -> None:
        """Start a round in which no sequence has been passed."""
        self._waiting = waiting
        self._running = running
        self._passed: dict[Sequence, Holding] = {}

    @property
    def passed(self) -> Collection[Sequence]:
        """Sequences that others pass, because their adapters are not in memory."""
        return self._passed.keys()

    def next_candidate(self) -> Candidate | None:
        """Return the next sequence, with its adapters held or refused.

        Returns:
            None if no sequence can be admitted, because none waits or because all wait for adapters.
        """
        while (sequence := self._next_sequence()) is not None:
            has_room = Holding.NO_ROOM not in self._passed.values()
            try:
                holding = self._running.hold(sequence, has_room=has_room)
            except AdapterError as error:
                return Candidate(sequence, error)
            if holding is Holding.HELD:
                return Candidate(sequence)
            self._passed[sequence] = holding
        return None

    def _next_sequence(self) -> Sequence | None:
        """Return the first sequence that was not passed; a suspect goes first, and alone."""
        suspect = self._waiting.suspect
        if suspect is None:
            return self._waiting.first_but(self._passed)
        return None if self._running or suspect in self._passed else suspect
