"""The caches of the rows that decode together, as a decoder sees them; and those of a row alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from machd.engine.backend.untyped import Cache
from machd.engine.kv.rollback import CacheCheckpoint, supports_rollback
from machd.engine.kv.row_caches import innermost

STEP_TOKENS = 256
"""Positions by which mlx-lm's caches grow."""


@dataclass(frozen=True, slots=True)
class PrefilledRow:
    """A prompt whose tokens, all but the last, are in caches.

    Attributes:
        layers: The caches that hold it, of one row or of several.
        length: Positions it has there.
        limit: Positions that prompt and completion may take together.
        last_token_id: The token that the first decode step starts from.
        index: Its row in the caches.
    """

    layers: Sequence[Cache]
    length: int
    limit: int
    last_token_id: int
    index: int = 0


class LaneKv(Protocol):
    """What a decoder asks of the caches of its rows."""

    @property
    def layers(self) -> list[Cache]:
        """One entry for each cache of the model, as its forward pass takes them."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    @property
    def takes_ragged_spans(self) -> bool:
        """Whether a pass may take several tokens of a row, of each another number."""
        ...

    @property
    def can_roll_back(self) -> bool:
        """Whether a pass may take several tokens of each row that may have to be taken back.

        With recurrent state that depends on the model's code, too: it has to leave out what pads a row.
        """
        ...

    def checkpoint(self) -> None:
        """Remember where the rows are, before the one pass whose tokens may be taken back.

        Only where :attr:`can_roll_back`. No row comes or goes before :meth:`roll_back`.
        """
        ...

    def roll_back(self, counts: Sequence[int]) -> bool:
        """Take the last positions of each row out again; the mark is gone then.

        Args:
            counts: How many of each row, no more than have come since :meth:`checkpoint`.

        Returns:
            Whether it is done. If it is not, all caches of all rows are where they were at
            :meth:`checkpoint`, and what is to be kept of the pass has to be computed again.
        """
        ...

    def open_step(self, lengths: Sequence[int] | None = None) -> None:
        """Begin a forward pass.

        Args:
            lengths: Tokens of each row, shorter rows padded; one each unless given.
        """
        ...

    def close_step(self) -> None:
        """The pass that was opened is dispatched."""
        ...

    def growth_bytes(
        self, joining: Sequence[tuple[int, int]], tokens: int, bytes_per_token: int
    ) -> int:
        """Bytes that the next pass allocates for caches, at most.

        Args:
            joining: Length and limit of each row that joins before it, as in :class:`PrefilledRow`.
            tokens: Tokens that it takes of each row.
            bytes_per_token: Of one position of one row, over all layers.
        """
        ...

    def join(self, row: PrefilledRow) -> None:
        """Add a row behind the others."""
        ...

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order; at least one."""
        ...

    def clear(self) -> None:
        """Drop all rows and what they held."""
        ...

    def wipe(self, row: int, begin: int = 0) -> None:
        """Make sure that nothing of a row that went wrong can reach a later token.

        Args:
            row: Its place.
            begin: The position from which on it went wrong; the row has no more than those before,
                or is about to leave.
        """
        ...


class SerialLaneKv:
    """One row, in the caches that the model itself makes."""

    def __init__(self) -> None:
        """Begin without the row."""
        self._layers: list[Cache] = []
        self._can_roll_back = False
        self._checkpoint: CacheCheckpoint | None = None
        self._added = 0

    @property
    def layers(self) -> list[Cache]:
        """The row's own caches."""
        return self._layers

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return held_bytes(self._layers)

    @property
    def takes_ragged_spans(self) -> bool:
        """Always: to the model it is as if the prompt went on."""
        return True

    @property
    def can_roll_back(self) -> bool:
        """Whether every cache is of a class that is known to be brought back."""
        return self._can_roll_back

    def checkpoint(self) -> None:
        """Remember where the row is."""
        self._checkpoint = CacheCheckpoint(innermost(self._layers))
        self._added = 0

    def roll_back(self, counts: Sequence[int]) -> bool:
        """Take the row's last positions out again; not done where there is recurrent state."""
        checkpoint, self._checkpoint = self._checkpoint, None
        assert checkpoint is not None, "there is a checkpoint"
        return checkpoint.roll_back(counts, [self._added])

    def open_step(self, lengths: Sequence[int] | None = None) -> None:
        """Nothing to prepare: the caches count their positions themselves."""
        self._added += 1 if lengths is None else lengths[0]

    def close_step(self) -> None:
        """Nothing padded it."""

    def growth_bytes(
        self, joining: Sequence[tuple[int, int]], tokens: int, bytes_per_token: int
    ) -> int:
        """Nothing for the row that joins; mlx-lm's caches grow by 256 positions, layer by layer."""
        return max(tokens, STEP_TOKENS) * bytes_per_token if self._layers or joining else 0

    def join(self, row: PrefilledRow) -> None:
        """Take the row's caches over."""
        assert not self._layers, "there is one row"
        assert row.index == 0, "the row was computed alone"
        self._layers = list(row.layers)
        self._can_roll_back = all(supports_rollback(cache) for cache in innermost(self._layers))

    def keep(self, order: Sequence[int]) -> None:
        """The only row stays."""
        assert list(order) == [0], "there is one row"

    def clear(self) -> None:
        """Drop the row."""
        self._layers = []
        self._checkpoint = None

    def wipe(self, row: int, begin: int = 0) -> None:
        """Nothing to do: the caches give no column behind the row's end."""


def held_bytes(caches: Sequence[Cache]) -> int:
    """Bytes that caches hold."""
    return sum(int(cache.nbytes) for cache in caches)
