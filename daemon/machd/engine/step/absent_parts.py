"""Parts that an engine can do without: each does nothing where its port is asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from machd.engine.protocol.media import MediaSpan
from machd.engine.protocol.step import EncodeRow
from machd.engine.step.ports import EncodeOutcome


class NoExperts:
    """All experts are in memory, if the model has any."""

    def reading(self) -> None:
        """Return None: there is no bank."""

    def take_fault(self) -> None:
        """Return None: nothing is read."""

    def close(self) -> None:
        """Do nothing."""


class NoMedia:
    """The model takes text only."""

    processor = None
    has_features = has_positions = False

    def encode(self, rows: Sequence[EncodeRow], limit_s: float) -> EncodeOutcome:
        """Refuse: only a model with vision is given images."""
        raise AssertionError(f"a model without vision is given {len(rows)} images ({limit_s} s)")

    def inputs(
        self, keys: Sequence[int], start: int, spans: Sequence[MediaSpan]
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """Return the token ids int32 [1, n]; there are no features."""
        del start, spans
        return mx.array([keys], dtype=mx.int32), {}

    def shift(self, spans: Sequence[MediaSpan]) -> int:
        """Return 0: positions are places."""
        del spans
        return 0

    def reading(self) -> None:
        """Return None: there is no cache."""

    def forget_rows(self, slot_indices: Iterable[int] | None = None) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
