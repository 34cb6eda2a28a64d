"""Rollback of the last tokens of a pass, cache by cache.

A standard cache has a column for each position, and the last ones are dropped. So are a window's after
one pass of several tokens: mlx-lm then leaves its columns in order of position, and as many older ones
as the first token sees. Recurrent state has no columns: it is restored whole, for all rows.

A checkpoint copies nothing. ``mx.array(a)`` is another name for what ``a`` holds now, and mlx writes into
memory in place only where an array has one name, and into a copy otherwise. Windows and states get new
arrays in a pass of several tokens anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.quantized_cache import QuantizedCache
from machd.engine.kv.row_caches import CacheState


def supports_rollback(cache: Cache) -> bool:
    """Return True if tokens can be rolled back in an innermost cache of this class."""
    return type(cache) in _checkpoint_classes()


class CacheCheckpoint:
    """The state of a set of caches before a pass."""

    def __init__(self, caches: Iterable[Cache]) -> None:
        """Remember innermost caches, each of a class that supports rollback."""
        classes = _checkpoint_classes()
        self._parts = [classes[type(cache)](cache) for cache in caches]

    def roll_back(self, counts: Sequence[int], added: Sequence[int]) -> bool:
        """Remove the last positions of each row; the checkpoint is of no further use.

        Args:
            counts: Positions to remove from each row; 0 or more.
            added: Positions that each row has got since, in one pass.

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


class _ColumnCheckpoint:
    """A cache with a column for each position."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        # Not the row's length: a layer without attention never writes into its cache.
        self._offset = cache.offset

    def cut(self, count: int) -> bool:
        """Drop the last positions; their columns will be overwritten."""
        self._cache.trim(count)
        return True

    def restore(self) -> None:
        """Drop all positions since the checkpoint."""
        self._cache.offset = self._offset


class _StateCheckpoint:
    """A cache without a column for each position."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._state = _aliased(cache.state)

    def cut(self, count: int) -> bool:
        """Refuse, unless there is nothing to drop."""
        return not count

    def restore(self) -> None:
        """Give the cache its state at the checkpoint."""
        self._cache.state = self._state


class _WindowCheckpoint(_StateCheckpoint):
    """A window of one row's own cache."""

    def cut(self, count: int) -> bool:
        """Drop the last columns, if the others are all that the row will see."""
        keys, values, offset, keep, max_size, index = self._cache.state
        if keys is None:
            return True
        if not _is_cuttable(keys, offset, index, max_size, count):
            return False
        kept = index - count
        # Columns after the index would be taken for the older ones of a ring.
        keys, values = keys[..., :kept, :], values[..., :kept, :]
        self._cache.state = (keys, values, offset - count, keep, max_size, kept)
        return True


def _checkpoint_classes() -> Mapping[type, type[_ColumnCheckpoint | _StateCheckpoint]]:
    """Checkpoints by the exact class of a cache: a model's own subclass may do anything besides."""
    from mlx_lm.models.cache import (  # noqa: PLC0415 - after import_mlx_lm()
        ArraysCache,
        KVCache,
        RotatingKVCache,
    )

    return {
        KVCache: _ColumnCheckpoint,
        QuantizedCache: _ColumnCheckpoint,
        RotatingKVCache: _WindowCheckpoint,
        ArraysCache: _StateCheckpoint,
    }


def _is_cuttable(keys: mx.array, offset: int, index: int, max_size: int, count: int) -> bool:
    """Return True if a window without its last columns is still a whole window, in order.

    Columns before the index are in order of position after a pass of several tokens, and as long as
    there was room for every position.
    """
    is_ordered = index in (keys.shape[2], offset)
    return is_ordered and index - count >= min(offset - count, max_size)


def _aliased(state: CacheState) -> CacheState:
    """Return a state's arrays under names of their own, safe from writes under other names."""
    if isinstance(state, mx.array):
        return mx.array(state)
    if isinstance(state, tuple | list):
        return [_aliased(one) for one in state]
    return state
