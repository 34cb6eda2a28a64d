"""The protocol by which long work reports its progress."""

from __future__ import annotations

from typing import Protocol


class LoadProgress(Protocol):
    """Receives the stages of loading or fetching, on the thread that does the work."""

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Begin a stage; ``total_bytes`` is None where its size is not known."""
        ...

    def advance(self, done_bytes: int) -> None:
        """Count bytes of the current stage as done."""
        ...


class SilentProgress:
    """Drops all reports."""

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Do nothing."""

    def advance(self, done_bytes: int) -> None:
        """Do nothing."""
