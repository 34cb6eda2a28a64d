"""Rollback of the last tokens of a pass, cache by cache.

A standard cache has a column for each position: its last columns are dropped. A window's last columns are
dropped too after one pass of several tokens: mlx-lm then keeps a window's columns in order of position, and as
many older ones as the first token sees. Recurrent state has no columns: the state of all rows is restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from machd.engine.backend.untyped import Cache
from machd.engine.kv.layers.batched_cache import Checkpoint
from machd.engine.kv.layers.kinds import kind_of


def supports_rollback(cache: Cache) -> bool:
    """Return True if tokens can be rolled back in an innermost cache of this class, of one row."""
    return kind_of(cache).max_rolled_back_rows > 0


class CacheCheckpoint:
    """The state of a set of caches before a pass."""

    def __init__(self, parts: Iterable[Checkpoint]) -> None:
        self._parts = list(parts)

    @classmethod
    def of(cls, caches: Iterable[Cache]) -> Self:
        """Make a checkpoint of a row's innermost caches, each of a class that supports rollback."""
        return cls(kind_of(cache).row_checkpoint(cache) for cache in caches)

    def roll_back(self, counts: Sequence[int], added: Sequence[int]) -> bool:
        """Remove ``counts`` of the last positions of each row, of those ``added`` in one pass; the checkpoint is then of no use.

        Returns:
            True if done. Otherwise all caches are as they were at the checkpoint.
        """
        assert all(0 <= one <= new for one, new in zip(counts, added, strict=True)), (
            "only positions since the checkpoint are removed"
        )
        if not any(counts) or not self._parts:
            return True
        if len(counts) == 1 and counts[0] < added[0] and all(p.cut(counts[0]) for p in self._parts):
            return True
        for part in self._parts:
            part.restore()
        return list(counts) == list(added)
