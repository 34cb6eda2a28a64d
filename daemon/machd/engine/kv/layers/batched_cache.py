"""The protocol of a kind of cache, in two halves: what one row's cache can do, and one cache of all rows of a batch.

By default a kind has no columns, and is copied and restored through mlx-lm's ``state``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, Self

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.kv_format import KvFormat
from machd.engine.kv.lane_kv import JoiningRow
from machd.engine.kv.layers.cache_state import CacheState, StateCheckpoint, copied
from machd.engine.kv.row_positions import RowPositions


class Checkpoint(Protocol):
    """A cache before a pass."""

    def cut(self, count: int) -> bool:
        """Drop the last positions; return False where that cannot be done."""
        ...

    def restore(self) -> None:
        """Drop all positions since the checkpoint."""
        ...


class RowCacheMethods:
    """Static methods on ``cache``, the cache that mlx-lm makes for one row; those with ``row`` take a batch's cache too."""

    @staticmethod
    def can_batch(cache: Cache) -> bool:
        """Return True if rows with such caches can share a pass."""
        del cache
        return True

    @staticmethod
    def in_format(cache: Cache, kv_format: KvFormat) -> Cache:
        """Return an empty cache in place of this one, in a KV format if the kind takes any."""
        del kv_format
        return cache

    @staticmethod
    def make_room(cache: Cache, tokens: int) -> None:
        """Have the cache's next growth make room for ``tokens`` tokens, if each growth copies the cache."""
        del cache, tokens

    @staticmethod
    def row_columns(cache: Cache, row: int, begin: int) -> tuple[mx.array, ...] | None:
        """Return a row's arrays [1, heads, columns, n], keys first, from position ``begin`` on.

        There may be more columns than positions, with any content. Empty before the first write; None for a
        kind without columns.
        """
        del cache, row, begin
        return None

    @staticmethod
    def fill_columns(cache: Cache, arrays: Sequence[mx.array], length: int) -> None:
        """Put the first ``length`` positions into an empty cache; see :meth:`row_columns`."""
        assert not arrays, f"{type(cache).__name__} has no columns for {length} positions"

    @staticmethod
    def row_state(cache: Cache, row: int) -> CacheState:
        """Copy the state of one row in a form that an empty cache can be given."""
        assert row == 0, "a cache of another class has one row"
        return copied(cache.state)

    @staticmethod
    def row_checkpoint(cache: Cache) -> Checkpoint:
        """Make a checkpoint of a cache before a pass."""
        return StateCheckpoint(cache)


class BatchedCache(RowCacheMethods, ABC):
    """One cache of the model for all rows of a batch.

    Attributes:
        has_columns: Each position of a row has a column, given by the batch's layout. So blocks can be cut,
            prefixes shared, and padding lies after a row's end.
        follows_positions: The batch's positions give each row's end, and rollback cuts them. Any other kind gets
            the rows' lengths in a padded pass, and makes its own checkpoint.
        max_rolled_back_rows: Most rows for which a pass can be rolled back at a time.
        grows_early: There is a :meth:`grow_early` to call before each pass.
    """

    has_columns: ClassVar[bool] = False
    follows_positions: ClassVar[bool] = False
    max_rolled_back_rows: ClassVar[float] = 0
    grows_early: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, cache: Cache, positions: RowPositions, max_rows: int) -> Self:
        """Begin a batch of caches like this one of a row, without rows."""

    @property
    def model_cache(self) -> Cache:
        """The cache that the model's forward pass takes, the same object as long as there are rows."""
        return self

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held, room to spare included."""

    @abstractmethod
    def join(self, cache: Cache, index: int) -> None:
        """Copy row ``index`` of a cache in as the last row; the positions have it already."""

    @abstractmethod
    def select(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order, which the positions have kept already."""

    def hold_prefix(self, number: int, arrays: Sequence[mx.array]) -> None:
        """Keep a prefix [1, heads, tokens, n] as long as a row shares it."""
        assert not arrays, f"prefix {number} has columns"

    def grow_early(self) -> bool:
        """Grow before it is needed, for a row more and for the next positions; return False if there is room."""
        return False

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set each row's number of tokens for a padded pass."""
        del lengths

    def drop_lengths(self) -> None:
        """End a padded pass."""
        return

    def checkpoint(self) -> Checkpoint:
        """Make a checkpoint of all rows before a pass."""
        return self.row_checkpoint(self.model_cache)

    def wipe(self, row: int, begin: int = 0) -> None:
        """Zero a row's own numbers from a position on: a NaN reaches later tokens, as 0 x NaN is NaN."""
        del row, begin

    def added_bytes(self, joining: Sequence[JoiningRow], tokens: int) -> int:
        """Return the bytes by which a pass of so many tokens grows it after rows have joined; columns not counted."""
        del joining, tokens
        return 0


class PositionedKv(BatchedCache):
    """A cache whose rows end where the batch's positions say, with the attributes that mlx-lm's models ask for."""

    follows_positions: ClassVar[bool] = True
    _positions: RowPositions
    _written_pass = 0

    @property
    def offset(self) -> mx.array:
        """Positions of each row, int32 [rows]; this layer's new tokens count once written."""
        positions = self._positions
        return positions.end if self._written_pass == positions.pass_number else positions.start

    @property
    def width(self) -> int:
        """Positions of the longest row, those of the running pass included."""
        return self._positions.width

    def is_trimmable(self) -> bool:
        """Return False: rows end at different positions, so the whole cannot be cut."""
        return False
