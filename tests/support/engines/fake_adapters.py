"""Room for adapters of the scripted engine: whatever a row asks for is in memory, and is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from machd.engine.protocol.adapters import Holding
from machd.engine.protocol.memory import AdapterReading
from machd.request.adapter import Adapter


class FakeAdapterRoom:
    """Adapters that rows hold; each that was ever held stays in a made-up memory until that is short."""

    def __init__(self, adapter_bytes: int = 0) -> None:
        """Begin without any; each request's take ``adapter_bytes``."""
        self._adapter_bytes = adapter_bytes
        self._held: Counter[tuple[Adapter, ...]] = Counter()
        self._loaded: set[tuple[Adapter, ...]] = set()

    def load(self, limit_s: float) -> bool:
        """Do nothing: adapters are there at once."""
        del limit_s
        return False

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

    def drop_unused(self, missing_bytes: int) -> bool:
        """Drop what no row holds."""
        del missing_bytes
        unused = {one for one in self._loaded if not self._held[one]}
        self._loaded -= unused
        return bool(unused)

    def reading(self) -> AdapterReading:
        """Return how many there are."""
        held = sum(count > 0 for count in self._held.values())
        used_bytes = self._adapter_bytes * len(self._loaded)
        return AdapterReading(loaded=len(self._loaded), held=held, used_bytes=used_bytes)

    def close(self) -> None:
        """Drop all of them."""
        self._loaded.clear()
