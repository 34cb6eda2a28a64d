"""What of the KV budget running sequences were promised, and in which lane."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from machd.engine.protocol.step import Lane
from machd.scheduler.admission import KvBudget, Promised, check_budget
from machd.scheduler.sequence import Sequence
from machd.scheduler.slots import Slots


class Reservations:
    """The books of the KV budget, one entry a slot."""

    def __init__(self, kv: KvBudget | None, *, max_rows: int) -> None:
        """Start with nothing promised.

        Args:
            kv: The budget; None where sequences run alone, which needs none.
            max_rows: The most rows that the batch lane can have.
        """
        self._kv = kv
        self._max_rows = max_rows
        self._entries: dict[int, tuple[Lane, int]] = {}
        self._room_bytes: int | None = None

    @property
    def budget_bytes(self) -> int | None:
        """What may be promised; None for no limit."""
        return self._kv.budget_bytes if self._kv is not None else None

    @property
    def reserved_bytes(self) -> int:
        """What is promised: the batch lane's padding included."""
        if self._kv is None:
            return 0
        return self._promised.bytes_of(self._kv)

    def check(
        self, new: tuple[Sequence, ...], waiting: Iterable[Sequence], retry_after_s: int
    ) -> None:
        """Refuse a request's sequences that can never run, or that may not wait under ``reject``.

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
        """Note what running sequences may hold together, as far as the memory that is left goes.

        Args:
            room_bytes: What they hold now and what they can still take; None where that is unknown.
        """
        self._room_bytes = room_bytes

    def lane_for(self, sequence: Sequence) -> Lane | None:
        """The lane in which a sequence could run now; None while it does not fit.

        Beside others it has to fit into the memory that is left as well. A sequence that would run
        alone is let in: only the engine knows what its steps take.
        """
        if self._kv is None:
            return Lane.SERIAL
        kv = self._kv
        if self._entries and self._room_bytes is not None:
            kv = replace(kv, budget_bytes=min(kv.budget_bytes, self._room_bytes))
        return self._promised.lane_for(kv, sequence.reserved_tokens)

    def reserve(self, slot_index: int, lane: Lane, tokens: int) -> None:
        """Promise the sequence of a slot its positions."""
        assert slot_index not in self._entries, "a slot is promised once"
        self._entries[slot_index] = (lane, tokens)

    def release(self, slot_index: int) -> None:
        """Take back what was promised."""
        del self._entries[slot_index]

    def check_invariants(self, slots: Slots) -> None:
        """Assert that every running sequence, and nobody else, holds what it was promised."""
        expected = {one.slot_index: (one.lane, one.reserved_tokens) for one in slots}
        assert self._entries == expected, (
            f"KV reservations do not add up: promised {self._entries}, running {expected}"
        )
        if self._kv is not None:
            assert self.reserved_bytes <= self._kv.budget_bytes, "more is promised than there is"
            assert len(self._tokens(Lane.SERIAL)) <= 1, "one serial row at a time"

    @property
    def _promised(self) -> Promised:
        batch, serial = self._tokens(Lane.BATCH), self._tokens(Lane.SERIAL)
        return Promised(batch, serial, self._max_rows)

    def _tokens(self, lane: Lane) -> tuple[int, ...]:
        return tuple(tokens for one, tokens in self._entries.values() if one is lane)
