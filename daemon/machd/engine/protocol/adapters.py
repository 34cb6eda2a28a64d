"""Adapters in memory, as the scheduler knows them: held for a row, or on their way.

A sequence with adapters is admitted once they are held; until then others are admitted before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from machd.request.adapter import Adapter


@dataclass(frozen=True, slots=True)
class AdapterReading:
    """Adapters in memory at a moment.

    Attributes:
        loaded: Number of them.
        held: Of those, with rows.
        loading: On their way.
        used_bytes: What they take.
    """

    loaded: int = 0
    held: int = 0
    loading: int = 0
    used_bytes: int = 0


class AdapterRoom(Protocol):
    """Room for adapters. Every method is called on the engine thread."""

    def hold(self, adapters: Sequence[Adapter]) -> bool:
        """Keep adapters in memory until :meth:`release`; False if they are not there yet.

        An adapter that is not in memory begins to be loaded beside the steps; one that no row holds may make room for it.

        Raises:
            AdapterError: One of them cannot be used with this model; the message says why.
        """
        ...

    def release(self, adapters: Sequence[Adapter]) -> None:
        """Give back what :meth:`hold` has kept for one row."""
        ...

    def reading(self) -> AdapterReading:
        """Return the adapters in memory."""
        ...


class NoAdapterRoom:
    """An engine that serves no adapters."""

    def hold(self, adapters: Sequence[Adapter]) -> bool:
        """Return True for a row without any."""
        assert not adapters, "no adapters are served"
        return True

    def release(self, adapters: Sequence[Adapter]) -> None:
        """Do nothing: there are none."""

    def reading(self) -> AdapterReading:
        """Return nothing."""
        return AdapterReading()
