"""Caches of any class that mlx-lm batches by itself: ``merge`` makes one of a row, and ``extend`` adds others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from machd.engine.backend.untyped import Cache
from machd.engine.kv.lane_kv import JoiningRow
from machd.engine.kv.layers.batched_cache import BatchedCache
from machd.engine.kv.row_positions import RowPositions


class MergedKv(BatchedCache):
    """One layer's cache as mlx-lm batches it. It counts its positions itself, and cannot be rolled back."""

    def __init__(self) -> None:
        self._merged: Cache = None

    @classmethod
    def of(cls, cache: Cache, positions: RowPositions, max_rows: int) -> Self:
        """Begin without rows; mlx-lm's caches count their positions themselves."""
        del cache, positions, max_rows
        return cls()

    @staticmethod
    def can_batch(cache: Cache) -> bool:
        """Return True if mlx-lm can merge the cache; whether its results are right is measured (``capabilities/``)."""
        return hasattr(cache, "merge")

    @property
    def model_cache(self) -> Cache:
        """mlx-lm's cache of all rows."""
        return self._merged

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return int(self._merged.nbytes)

    def join(self, cache: Cache, index: int) -> None:
        """Merge the row's cache, in which it is alone."""
        del index
        row = cache.merge([cache])
        if self._merged is None:
            self._merged = row
        else:
            self._extend(row)

    def select(self, order: Sequence[int]) -> None:
        """Keep the rows of ``order``, in that order."""
        self._merged.filter(list(order))

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set each row's number of tokens for a padded pass."""
        self._merged.prepare(lengths=list(lengths))

    def drop_lengths(self) -> None:
        """Drop the padding of the pass."""
        self._merged.finalize()

    def added_bytes(self, joining: Sequence[JoiningRow], tokens: int) -> int:
        """Return the bytes of a copy if a row joins."""
        del tokens
        return self.nbytes if joining else 0

    def _extend(self, row: Cache) -> None:
        self._merged.extend(row)
