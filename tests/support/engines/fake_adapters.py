"""Room for adapters of the scripted engine: whatever a row asks for is in memory, and is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from machd.engine.protocol.adapters import Holding
from machd.engine.protocol.memory import AdapterReading
from machd.request.adapter import Adapter


class FakeAdapterRoom:
    """Adapters that rows hold; each that was ever held stays in a made-up memory."""

    def __init__(self) -> None:
        """Begin without any."""
        self._held: Counter[tuple[Adapter, ...]] = Counter()
        self._loaded: set[tuple[Adapter, ...]] = set()

    def hold(self, adapters: Sequence[Adapter]) -> Holding:
        """Count a row of these adapters."""
        if adapters:
            self._held[tuple(adapters)] += 1
            self._loaded.add(tuple(adapters))
        return Holding.HELD

    def release(self, adapters: Sequence[Adapter]) -> None:
        """Count one less."""
        if adapters:
            self._held[tuple(adapters)] -= 1
            assert self._held[tuple(adapters)] >= 0, "a row gives back what it has held"

    def reading(self) -> AdapterReading:
        """Return how many there are."""
        held = sum(count > 0 for count in self._held.values())
        return AdapterReading(loaded=len(self._loaded), held=held)

    def close(self) -> None:
        """Drop all of them."""
        self._loaded.clear()
