"""How long work tells whoever draws a progress bar."""

from __future__ import annotations

from typing import Protocol


class LoadProgress(Protocol):
    """Told about stages of loading or fetching, on the thread that does the work."""

    def stage(self, name: str, total_bytes: int | None) -> None:
        """A new stage begins; ``total_bytes`` is None where its size is not known."""
        ...

    def advance(self, done_bytes: int) -> None:
        """So many more bytes of the current stage are done."""
        ...


class SilentProgress:
    """Tells nobody."""

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Do nothing."""

    def advance(self, done_bytes: int) -> None:
        """Do nothing."""
