"""KV reservations of running sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from machd.engine.protocol.step import Lane, SharedPrefix
from machd.scheduler.admission import KvBudget, KvPolicy, Promised, check_budget
from machd.scheduler.common_prefixes import Sharing
from machd.scheduler.sequence import Sequence
from machd.scheduler.slots import Slots


@dataclass(frozen=True, slots=True)
class Reservation:
    """Positions reserved for one sequence.

    Attributes:
        tokens: Positions, those of its shared prefix included.
        shared: Beginning that it shares with others, whose positions are reserved once.
    """

    lane: Lane
    tokens: int
    shared: SharedPrefix | None = None

    @property
    def own_tokens(self) -> int:
        """Positions that are its own."""
        return self.tokens - (0 if self.shared is None else self.shared.tokens)


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
        self._entries: dict[int, Reservation] = {}
        self._room_bytes: int | None = None
        self._left_out_bytes = 0

    @property
    def budget_bytes(self) -> int | None:
        """KV budget in bytes; None for no limit."""
        return self._kv.budget_bytes if self._kv is not None else None

    @property
    def shares_prefixes(self) -> bool:
        """True if rows of the batch lane can share prefixes."""
        return self._kv is not None and self._kv.shares_prefixes

    @property
    def reserved_bytes(self) -> int:
        """Reserved bytes, with the batch lane's padding."""
        if self._kv is None:
            return 0
        return self._promised.bytes_of(self._kv)

    def check(
        self,
        new: tuple[Sequence, ...],
        waiting: Iterable[Sequence],
        retry_after_s: Callable[[], int],
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
            retry_after_s=retry_after_s() if self._kv.policy is KvPolicy.REJECT else 0,
        )

    def check_alone(self, sequence: Sequence) -> None:
        """Refuse a sequence that can never run.

        Raises:
            KvBudgetExceededError: It can never run.
        """
        if self._kv is None:
            return
        kv = replace(self._kv, policy=KvPolicy.DEFER)
        check_budget(
            kv, [sequence.reserved_tokens], running=self._promised, waiting=(), retry_after_s=0
        )

    def observe(self, room_bytes: int | None) -> None:
        """Limit admission to the free memory.

        Args:
            room_bytes: Bytes held by running sequences plus bytes left; None where unknown.
        """
        self._room_bytes = room_bytes

    def leave_out(self, used_bytes: int) -> None:
        """Take what adapters use out of the budget of sequences beside others."""
        self._left_out_bytes = used_bytes

    def lane_for(self, sequence: Sequence) -> Lane | None:
        """Return a lane with room for a sequence; None while there is none.

        Beside others it has to fit the free memory, too. A sequence that would run alone is admitted: only
        the engine knows the memory of its steps.
        """
        if self._kv is None:
            return Lane.SERIAL
        kv, promised = self._within_memory(self._kv), self._promised
        if not sequence.needs_serial_lane:
            return promised.lane_for(kv, sequence.reserved_tokens)
        with_it = promised.with_row(Lane.SERIAL, sequence.reserved_tokens)
        has_room = not promised.serial and with_it.bytes_of(kv) <= kv.budget_bytes
        return Lane.SERIAL if has_room else None

    def has_room_to_share(self, sequence: Sequence, sharing: Sharing) -> bool:
        """Return True if the batch lane has room for a sequence that shares a prefix."""
        assert self._kv is not None, "rows of a batch have a budget"
        entries = list(self._entries.values())
        peer = sharing.peer
        if peer is not None and peer.slot_index is not None:
            entry = self._entries[peer.slot_index]
            entries.remove(entry)
            entries.append(replace(entry, shared=sharing.prefix))
        entries.append(Reservation(Lane.BATCH, sequence.reserved_tokens, sharing.prefix))
        kv = self._within_memory(self._kv)
        return self._promised_by(entries).bytes_of(kv) <= kv.budget_bytes

    def reserve(self, sequence: Sequence) -> None:
        """Reserve positions for a sequence that got its slot, or shares a prefix since."""
        assert sequence.slot_index is not None, "a running sequence has a slot"
        self._entries[sequence.slot_index] = _reservation_of(sequence)

    def release(self, slot_index: int) -> None:
        """Release the reservation of a slot."""
        del self._entries[slot_index]

    def check_invariants(self, slots: Slots) -> None:
        """Assert that exactly the running sequences have reservations, within the budget."""
        expected = {one.slot_index: _reservation_of(one) for one in slots}
        assert self._entries == expected, (
            f"KV reservations do not add up: reserved {self._entries}, running {expected}"
        )
        if self._kv is not None:
            assert self.reserved_bytes <= self._kv.budget_bytes, "reservations exceed the KV budget"
            assert len(self._promised.serial) <= 1, "one serial row at a time"

    @property
    def _promised(self) -> Promised:
        return self._promised_by(self._entries.values())

    def _promised_by(self, entries: Iterable[Reservation]) -> Promised:
        entries = list(entries)
        shared = {one.shared for one in entries if one.shared is not None}
        return Promised(
            tuple(one.own_tokens for one in entries if one.lane is Lane.BATCH),
            tuple(one.tokens for one in entries if one.lane is Lane.SERIAL),
            self._max_rows,
            tuple(one.tokens for one in shared),
        )

    def _within_memory(self, kv: KvBudget) -> KvBudget:
        """Return what the budget and the free memory leave, or the budget if no other sequence runs."""
        if not self._entries:
            return kv
        budget_bytes = max(0, kv.budget_bytes - self._left_out_bytes)
        if self._room_bytes is not None:
            budget_bytes = min(budget_bytes, self._room_bytes)
        return replace(kv, budget_bytes=budget_bytes)


def _reservation_of(sequence: Sequence) -> Reservation:
    assert sequence.lane is not None, "a running sequence has a lane"
    return Reservation(sequence.lane, sequence.reserved_tokens, sequence.shared)
