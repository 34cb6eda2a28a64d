"""Open sequences: from the queue to their end, through slots and suspensions.

A subscriber ends once. Its sequence goes on while other subscribers are left, and gives back its place in the queue,
or its slot and reservation, with the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from machd.engine.protocol.step import SampledToken
from machd.errors import MachdError
from machd.scheduler.coalesce import CoalescingIndex, is_shareable
from machd.scheduler.departures import Departures
from machd.scheduler.events import Event, FinishReason, SequenceFinished, SuspendReason
from machd.scheduler.running import RunningSequences
from machd.scheduler.sequence import Sequence
from machd.scheduler.subscriber import Subscriber
from machd.scheduler.waiting import WaitingQueue


class OpenSequences(Mapping[str, Sequence]):
    """Waiting and running sequences by the id of each of their subscribers.

    Attributes:
        waiting: Those in the queue.
        running: Those with a slot; replaced with the config, at rest.
        index: Those that identical requests join.
        departures: Forecasts when they leave their slots.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSequences,
        index: CoalescingIndex,
        departures: Departures,
    ) -> None:
        """Start with none."""
        self.departures = departures
        self.waiting = waiting
        self.running = running
        self.index = index
        self._by_id: dict[str, Sequence] = {}
        self._next_number = 0

    def __getitem__(self, sequence_id: str) -> Sequence:
        """Return the sequence of an open subscriber."""
        return self._by_id[sequence_id]

    def __iter__(self) -> Iterator[str]:
        """Yield the ids of open subscribers."""
        return iter(self._by_id)

    def __len__(self) -> int:
        """Count the open subscribers."""
        return len(self._by_id)

    def sequence_for(self, subscriber: Subscriber, siblings: int, now_s: float) -> Sequence:
        """Find the sequence of an identical request, or make one; neither is opened yet.

        Args:
            subscriber: The one that is to be sent the tokens.
            siblings: Subscribers of its request, which would join together.
            now_s: Time of its submission on the monotonic clock.
        """
        found = self.index.find(subscriber.request, subscribers=siblings)
        if found is not None:
            return found
        number, self._next_number = self._next_number, self._next_number + 1
        sequence = Sequence(
            subscriber,
            number=number,
            submitted_s=now_s,
            keeps_tokens=self.index.is_on and is_shareable(subscriber.request),
        )
        self.index.add(sequence)
        return sequence

    def add(self, subscriber: Subscriber, sequence: Sequence) -> None:
        """Add a subscriber of a sequence that waits or runs."""
        self._by_id[subscriber.sequence_id] = sequence

    def abort(
        self, sequence_ids: tuple[str, ...], error: MachdError | None, now_s: float
    ) -> list[Event]:
        """End subscribers; unknown and finished ids are ignored."""
        events: list[Event] = []
        for sequence_id in sequence_ids:
            sequence = self.get(sequence_id)
            if sequence is not None:
                subscriber = next(
                    one for one in sequence.subscribers if one.sequence_id == sequence_id
                )
                events.append(self._end(subscriber, FinishReason.ABORT, now_s, error))
        return events

    def expire(self, now_s: float) -> list[Event]:
        """End timed-out subscribers."""
        late = self.waiting.timed_out(self.running, now_s)
        return [self._end(one, FinishReason.ERROR, now_s, error) for one, error in late]

    def fail(
        self, error: MachdError, sequences: Iterable[Sequence], now_s: float, *, is_sound: bool
    ) -> list[Event]:
        """End sequences with an error; ``is_sound`` lets what they have computed serve other sequences."""
        return [
            event
            for sequence in sequences
            for event in self.end(sequence, FinishReason.ERROR, now_s, error, is_sound=is_sound)
        ]

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_s: float,
        error: MachdError | None = None,
        *,
        is_sound: bool = True,
        stop_token: SampledToken | None = None,
    ) -> list[SequenceFinished]:
        """End a sequence with all its subscribers.

        Args:
            sequence: Waiting or running.
            reason: Why it ends.
            now_s: Time on the monotonic clock.
            error: What the client is told; None without an error.
            is_sound: What was computed may serve other sequences.
            stop_token: Token that ended it and is not part of the text.
        """
        return [
            self._end(subscriber, reason, now_s, error, is_sound=is_sound, stop_token=stop_token)
            for subscriber in tuple(sequence.subscribers)
        ]

    def suspend(self, sequence: Sequence, reason: SuspendReason, *, is_sound: bool) -> None:
        """Take a running sequence's slot and queue it to be resumed."""
        if sequence.completion_tokens:
            self.index.remove(sequence)  # a later subscriber would have to be sent what it missed
        self.running.leave(sequence, is_sound=is_sound)
        sequence.suspend(reason)
        self.waiting.add(sequence)

    def check_invariants(self, *, is_whole: bool) -> None:
        """Assert that slots, queue, sequences, reservations and prefix cache agree.

        Args:
            is_whole: Check all blocks of the prefix cache, and not only those of running sequences.
        """
        self.running.check_invariants(is_whole=is_whole)
        self.waiting.check_invariants()
        sequences = [*self.running, *self.waiting]
        expected = {
            one.sequence_id: sequence for sequence in sequences for one in sequence.subscribers
        }
        assert self._by_id == expected, "the open sequences are not those that slots and queue hold"
        self.index.check_invariants(sequences)

    def _end(
        self,
        subscriber: Subscriber,
        reason: FinishReason,
        now_s: float,
        error: MachdError | None = None,
        *,
        is_sound: bool = True,
        stop_token: SampledToken | None = None,
    ) -> SequenceFinished:
        """End one subscriber; its sequence goes on while others are left."""
        sequence = self._by_id.pop(subscriber.sequence_id)
        sequence.subscribers.remove(subscriber)
        if not sequence.subscribers:
            self._retire(sequence, is_sound=is_sound)
        return subscriber.finish(
            reason, now_s, error, cached_tokens=sequence.reused_tokens, stop_token=stop_token
        )

    def _retire(self, sequence: Sequence, *, is_sound: bool) -> None:
        """Free the place, or the slot and reservation, of a sequence without subscribers."""
        self.index.remove(sequence)
        if sequence.slot_index is None:
            self.waiting.remove(sequence)
            return
        self.running.leave(sequence, is_sound=is_sound)
        self.departures.note_end(sequence)
        if is_sound:
            self.running.allow_one_more()
