"""KV reservations of running sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from machd.engine.protocol.step import Lane
from machd.scheduler.admission import KvBudget, Promised, check_budget
from machd.scheduler.sequence import Sequence
from machd.scheduler.slots import Slots


class Reservations:
    """KV reservations by slot, within a KV budget."""

    def __init__(self, kv: KvBudget | None, *, max_rows: int) -> None:
        """Start without reservations.

        Args:
            kv: The budget; None for no limit, where sequences run alone.
            max_rows: Most rows of the batch lane.
        """
        self._kv = kv
        self._max_rows = max_rows
        self._entries: dict[int, tuple[Lane, int]] = {}
        self._room_bytes: int | None = None

    @property
    def budget_bytes(self) -> int | None:
        """KV budget in bytes; None for no limit."""
        return self._kv.budget_bytes if self._kv is not None else None

    @property
    def reserved_bytes(self) -> int:
        """Reserved bytes, with the batch lane's padding."""
        if self._kv is None:
            return 0
        return self._promised.bytes_of(self._kv)

    def check(
        self, new: tuple[Sequence, ...], waiting: Iterable[Sequence], retry_after_s: int
    ) -> None:
        """Refuse a request's sequences that can never run, or cannot run now under ``reject``.

        Raises:
            KvBudgetExceededError: They can never run.
            KvBudgetSpentError: They cannot run now.
        """
        if self._kv is None:
            return
        check_budget(
            self._kv,
            [sequence.reserved_tokens for sequence in new],
            running=self._promised,
            waiting=(sequence.reserved_tokens for sequence in waiting),
            retry_after_s=retry_after_s,
        )

    def observe(self, room_bytes: int | None) -> None:
        """Limit admission to the memory that is left.

        Args:
            room_bytes: Bytes held by running sequences plus bytes left; None where unknown.
        """
        self._room_bytes = room_bytes

    def lane_for(self, sequence: Sequence) -> Lane | None:
        """Return a lane with room for a sequence; None while there is none.

        Beside others it has to fit the memory left, too. A sequence that would run alone is let in:
        only the engine knows what its steps take.
        """
        if self._kv is None:
            return Lane.SERIAL
        kv = self._kv
        if self._entries and self._room_bytes is not None:
            kv = replace(kv, budget_bytes=min(kv.budget_bytes, self._room_bytes))
        return self._promised.lane_for(kv, sequence.reserved_tokens)

    def reserve(self, slot_index: int, lane: Lane, tokens: int) -> None:
        """Reserve ``tokens`` positions for the sequence of a slot."""
        assert slot_index not in self._entries, "a slot has one reservation"
        self._entries[slot_index] = (lane, tokens)

    def release(self, slot_index: int) -> None:
        """Release the reservation of a slot."""
        del self._entries[slot_index]

    def check_invariants(self, slots: Slots) -> None:
        """Assert that exactly the running sequences have reservations, within the budget."""
        expected = {one.slot_index: (one.lane, one.reserved_tokens) for one in slots}
        assert self._entries == expected, (
            f"KV reservations do not add up: reserved {self._entries}, running {expected}"
        )
        if self._kv is not None:
            assert self.reserved_bytes <= self._kv.budget_bytes, "reservations exceed the KV budget"
            assert len(self._tokens(Lane.SERIAL)) <= 1, "one serial row at a time"

    @property
    def _promised(self) -> Promised:
        batch, serial = self._tokens(Lane.BATCH), self._tokens(Lane.SERIAL)
        return Promised(batch, serial, self._max_rows)

    def _tokens(self, lane: Lane) -> tuple[int, ...]:
        return tuple(tokens for one, tokens in self._entries.values() if one is lane)
