"""The protocol of a lane's KV: all that a decoder sees of its rows' caches.

Two classes satisfy :class:`LaneKv`: :mod:`machd.engine.kv.batch_lane` for rows that share a forward pass,
:mod:`machd.engine.kv.serial_lane` for a row that has its own. :meth:`LaneKv.locate` gives
a row's place in the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from machd.engine.backend.untyped import Cache
from machd.engine.protocol.step import SharedPrefix


@dataclass(frozen=True, slots=True)
class PrefilledRow:
    """A prompt with the keys and values of all its tokens but the last.

    Attributes:
        caches: One cache for each cache of the model, of this row or of several.
        length: Positions that the row has there.
        limit: Positions that prompt and completion may take together.
        last_token_id: The token that the first decode step starts from.
        index: The row's place in the caches.
        shared: Prefix that it may share with other rows of a lane.
    """

    caches: Sequence[Cache]
    length: int
    limit: int
    last_token_id: int
    index: int = 0
    shared: SharedPrefix | None = None


@dataclass(frozen=True, slots=True)
class JoiningRow:
    """A row that is about to join a batch.

    Attributes:
        length: Positions that it has.
        limit: Positions that it may ever have.
        shared: Prefix that it shares with other rows, if any.
    """

    length: int
    limit: int
    shared: SharedPrefix | None = None


@dataclass(frozen=True, slots=True)
class CachedRow:
    """A row's place in a set of caches.

    Attributes:
        caches: One for each cache of the model, of this row or of several.
        index: The row's place in them.
        length: Positions that are computed and known to be finite.
        is_exact: The caches hold exactly these positions, so state and windows are those at ``length``.
    """

    caches: Sequence[Cache]
    index: int
    length: int
    is_exact: bool = True


class LaneKv(Protocol):
    """Keys, values and recurrent state of the rows of one lane.

    Attributes:
        caches: One entry for each cache of the model, as its forward pass takes them.
    """

    caches: list[Cache]

    @property
    def nbytes(self) -> int:
        """Allocated bytes, spare columns included."""
        return held_bytes(self.caches)

    @property
    def takes_ragged_spans(self) -> bool:
        """True if unequal spans need no measurement of the model: every cache has columns, and padding lands after a row's end.

        Other caches take them where the plan allows drafts: the model passed batched_drafts (``capabilities/``).
        """
        ...

    @property
    def can_roll_back(self) -> bool:
        """True if the tokens of a pass can be undone: removed, or the pass computed again from before.

        With recurrent state the model's code has to skip a row's padding as well.
        """
        ...

    @property
    def room_tokens(self) -> int:
        """Tokens that a pass may have of each row, padding included, within the columns reserved for them."""
        ...

    def locate(self, row: int, length: int) -> CachedRow:
        """Find a row's caches."""
        return CachedRow(self.caches, row, length)

    def join(self, row: PrefilledRow) -> None:
        """Add a row after the others."""
        ...

    def select(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order; at least one."""
        ...

    def clear(self) -> None:
        """Drop all rows and free their memory."""
        ...

    def begin_pass(self, lengths: Sequence[int] | None = None) -> None:
        """Begin a forward pass of ``lengths`` tokens of each row, shorter spans padded at the end; of one each unless given."""
        ...

    def end_pass(self) -> None:
        """End the pass once it is dispatched."""
        return

    def checkpoint(self) -> None:
        """Make the next pass one that can be rolled back.

        Only where :attr:`can_roll_back`. No row joins or leaves before :meth:`roll_back`.
        """
        ...

    def roll_back(self, counts: Sequence[int]) -> bool:
        """Remove the last positions of each row and drop the checkpoint.

        Args:
            counts: Positions to remove from each row, at most as many as it got since :meth:`checkpoint`.

        Returns:
            True if done. Otherwise all rows are as they were at :meth:`checkpoint`, and the tokens to
            keep have to be computed again.
        """
        ...

    def wipe(self, row: int, begin: int = 0) -> None:
        """Zero a row from its new end ``begin`` on, so that a NaN there does not reach later tokens."""
        del row, begin

    def growth_bytes(self, joining: Sequence[JoiningRow], tokens: int, bytes_per_token: int) -> int:
        """Upper bound of the bytes that a pass of so many tokens of each row allocates for caches, after rows have joined."""
        ...


def held_bytes(caches: Sequence[Cache]) -> int:
    """Sum the bytes that caches hold."""
    return sum(int(cache.nbytes) for cache in caches)
