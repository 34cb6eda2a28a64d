"""How far the load of a model is."""

from __future__ import annotations


class LoadStage:
    """The stage of a load, and the bytes that were read in it and before; a :class:`machd.engine.protocol.progress.LoadProgress`.

    Attributes:
        name: Of the stage; None before the first.
    """

    def __init__(self) -> None:
        """Begin before the first stage."""
        self.name: str | None = None
        self._total_bytes = self._done_bytes = 0

    @property
    def share(self) -> float:
        """Bytes read of all that are known to be read, from 0 to 1; 0 until some are."""
        return min(1.0, self._done_bytes / self._total_bytes) if self._total_bytes else 0.0

    def stage(self, name: str, total_bytes: int | None) -> None:
        """Begin a stage."""
        self.name = name
        self._total_bytes += total_bytes or 0

    def advance(self, done_bytes: int) -> None:
        """Count bytes of the stage as read."""
        self._done_bytes += done_bytes
