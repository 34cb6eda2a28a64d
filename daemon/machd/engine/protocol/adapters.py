"""Adapters in memory, as the scheduler knows them: held for a row, or on their way.

A sequence with adapters is admitted once they are held; until then others are admitted before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from machd.engine.protocol.memory import AdapterReading
from machd.errors import AdapterError
from machd.request.adapter import Adapter


class Holding(StrEnum):
    """Result of an attempt to keep adapters for a row."""

    HELD = "held"
    """They are in memory, and stay there."""

    LOADING = "loading"
    """They are on their way."""

    NO_ROOM = "no_room"
    """As many as fit are in memory, and rows use all of them."""


class AdapterRoom(Protocol):
    """Room for adapters. Every method is called on the engine thread."""

    def load(self, limit_s: float) -> bool:
        """Put adapters that have been read into memory, layer by layer, for about ``limit_s``; called between two steps.

        At least one layer is put there, so that a load always ends.

        Returns:
            True if layers are left that could be put there now.
        """
        ...

    def hold(self, adapters: Sequence[Adapter]) -> Holding:
        """Keep adapters in memory until :meth:`release`, if they are there.

        Adapters that are not begin to be loaded beside the steps; those that no row holds make room for them.

        Raises:
            AdapterError: One of them cannot be used with this model; the message says why.
        """
        ...

    def release(self, adapters: Sequence[Adapter]) -> None:
        """Give back what :meth:`hold` has kept for one row."""
        ...

    def drop_unused(self, missing_bytes: int) -> bool:
        """Drop adapters that no row holds, pinned ones aside, until so much memory is free; returns whether any was."""
        ...

    def reading(self) -> AdapterReading:
        """Return the adapters in memory."""
        ...


class ClosableAdapterRoom(AdapterRoom, Protocol):
    """Room for adapters as the engine owns it."""

    def close(self) -> None:
        """Drop all of them."""
        ...


class NoAdapterRoom:
    """An engine that computes no adapters, and refuses rows that ask for some."""

    def __init__(self, reason: str = "this engine computes no adapters") -> None:
        """Begin with what a refusal says."""
        self._reason = reason

    def load(self, limit_s: float) -> bool:
        """Do nothing: there are none."""
        del limit_s
        return False

    def hold(self, adapters: Sequence[Adapter]) -> Holding:
        """Hold nothing, for a row of the base model.

        Raises:
            AdapterError: It is no row of the base model.
        """
        if adapters:
            raise AdapterError(self._reason)
        return Holding.HELD

    def release(self, adapters: Sequence[Adapter]) -> None:
        """Do nothing: there are none."""

    def drop_unused(self, missing_bytes: int) -> bool:
        """Drop nothing."""
        del missing_bytes
        return False

    def reading(self) -> AdapterReading:
        """Return nothing."""
        return AdapterReading()

    def close(self) -> None:
        """Do nothing."""
