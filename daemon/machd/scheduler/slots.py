"""Slots of running sequences, and slots that the engine has still to free."""

from __future__ import annotations

from collections.abc import Iterator

from machd.engine.protocol.step import Lane
from machd.scheduler.sequence import Sequence


class Slots:
    """A fixed number of slots; the lowest free one is taken first."""

    def __init__(self, count: int) -> None:
        """Start with every slot free."""
        assert count >= 1, "there is at least one slot"
        self._count = count
        self._occupied: dict[int, Sequence] = {}
        self._released: set[int] = set()

    def __iter__(self) -> Iterator[Sequence]:
        """Yield running sequences in order of slot index."""
        return iter([sequence for _, sequence in sorted(self._occupied.items())])

    def __len__(self) -> int:
        """Count the occupied slots."""
        return len(self._occupied)

    @property
    def count(self) -> int:
        """Slots, free ones included."""
        return self._count

    @property
    def free_count(self) -> int:
        """Free slots."""
        return self._count - len(self._occupied)

    @property
    def released(self) -> tuple[int, ...]:
        """Slots left by their sequence and not freed by the engine yet."""
        return tuple(sorted(self._released))

    def at(self, slot_index: int) -> Sequence | None:
        """Return the sequence of a slot, if any."""
        return self._occupied.get(slot_index)

    def occupy(self, sequence: Sequence, lane: Lane, now_s: float) -> int:
        """Admit a sequence to the lowest free slot; returns its index."""
        assert self.free_count > 0, "no slot is free"
        slot_index = next(index for index in range(self._count) if index not in self._occupied)
        sequence.admit(slot_index, lane, now_s)
        self._occupied[slot_index] = sequence
        return slot_index

    def leave(self, slot_index: int) -> None:
        """Free a slot; the engine learns of it with the next plan."""
        del self._occupied[slot_index]
        self._released.add(slot_index)

    def confirm_released(self, slot_indices: tuple[int, ...]) -> None:
        """Note that the engine has freed slots."""
        self._released.difference_update(slot_indices)
