"""Where the caches of rows are before a pass, so that some of its tokens can be taken out again.

A standard cache has a column for each position, and what was added is cut off its end. So it is with
a window after one pass of several tokens: mlx-lm leaves the columns in their order then, and as many
of those before as the first of the tokens sees, so cut after a token it is as if the pass had ended
there. Recurrent state is known only as it is now, of all rows: it is what it was before, or as it is.

Nothing is copied. ``mx.array(a)`` is another name for what ``a`` holds now, and mlx never changes
what has a name: writing into ``a`` writes over its memory only if nobody else has it, and into a
copy otherwise. A window and a state get new arrays in a pass of several tokens anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import mlx.core as mx

from machd.engine.backend.untyped import Cache
from machd.engine.kv.quantized_cache import QuantizedCache
from machd.engine.kv.state import CacheState


def supports_rollback(cache: Cache, rows: int = 1) -> bool:
    """Whether it is known how tokens are taken out of an innermost cache.

    Args:
        cache: Of any class.
        rows: That it holds. Of several, a window's cannot be: mlx-lm pads them in front.
    """
    kind = _checkpoint_classes().get(type(cache))
    return kind is not None and (rows == 1 or kind is _StateCheckpoint)


class CacheCheckpoint:
    """Where caches are."""

    def __init__(self, caches: Iterable[Cache]) -> None:
        """Remember it of innermost caches, each of a class that can be marked."""
        classes = _checkpoint_classes()
        self._parts = [classes[type(cache)](cache) for cache in caches]

    def roll_back(self, counts: Sequence[int], added: Sequence[int]) -> bool:
        """Take the last positions of each row out again; the marks have no further use.

        Args:
            counts: How many of each row; 0 or more.
            added: How many of each row have come since, in one pass.

        Returns:
            Whether it is done. If it is not, all caches are where they were.
        """
        assert all(0 <= one <= new for one, new in zip(counts, added, strict=True)), (
            "what is taken back came after the mark"
        )
        if not any(counts) or not self._parts:
            return True
        if (
            len(counts) == 1
            and counts[0] < added[0]
            and all(part.cut(counts[0]) for part in self._parts)
        ):
            return True
        for part in self._parts:
            part.restore()
        return list(counts) == list(added)


def unroll_window(cache: Cache, length: int) -> None:
    """Bring the window of a batch's only row into order, without the padding in front of it.

    A pass of several tokens does the first itself. But where a ring has gone round, mlx-lm's mask for
    several tokens takes the padding for a column wider than it is by then.

    Args:
        cache: Of any class; all but windows of a batch stay as they are.
        length: Positions that the row has.
    """
    from mlx_lm.models.cache import BatchRotatingKVCache  # noqa: PLC0415 - after import_mlx_lm()

    if type(cache) is not BatchRotatingKVCache or cache.keys is None:
        return
    keys, values, _, _, max_size, _, index, is_rotated = cache.state
    if is_rotated:
        keys, values = (mx.roll(one, -index, 2) for one in (keys, values))
        index = keys.shape[2]
    # Columns are right-aligned: those that the row has no positions for stand in front.
    begin = max(index - length, 0)
    if is_rotated or begin or index < keys.shape[2]:
        keys, values = (one[..., begin:index, :] for one in (keys, values))
        offset, padding = (mx.array([number], dtype=mx.int32) for number in (length, 0))
        columns = index - begin
        cache.state = (keys, values, offset, padding, max_size, columns, columns, False)


class _ColumnCheckpoint:
    """Of a cache that has a column for each position."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        # Not the row's length: a layer without attention never writes into its cache.
        self._offset = cache.offset

    def cut(self, count: int) -> bool:
        """Forget the last positions; their columns will be written over."""
        self._cache.trim(count)
        return True

    def restore(self) -> None:
        """Forget all that came since."""
        self._cache.offset = self._offset


class _StateCheckpoint:
    """Of a cache that is known only as it is now."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._state = _aliased(cache.state)

    def cut(self, count: int) -> bool:
        """Nothing of it can be."""
        return not count

    def restore(self) -> None:
        """Give the cache what it had."""
        self._cache.state = self._state


class _WindowCheckpoint(_StateCheckpoint):
    """Of a window in the cache of one row."""

    def cut(self, count: int) -> bool:
        """Drop the last columns, where those that are left are all that the row will see."""
        keys, values, offset, keep, max_size, index = self._cache.state
        positions, kept = offset - count, index - count
        if keys is not None:
            if not _is_whole(keys, index, offset) or kept < min(positions, max_size):
                return False
            # Columns behind the index would be taken for the older ones of a ring.
            keys, values = keys[..., :kept, :], values[..., :kept, :]
            self._cache.state = (keys, values, positions, keep, max_size, kept)
        return True


class _BatchWindowCheckpoint(_StateCheckpoint):
    """Of a window in a batch of one row, straightened."""

    def cut(self, count: int) -> bool:
        """As of a window in the cache of one row."""
        keys, values, offsets, padding, max_size, offset, index, is_rotated = self._cache.state
        positions, kept = offset - count, index - count
        if keys is not None:
            if not _is_whole(keys, index, offset) or kept < min(positions, max_size):
                return False
            keys, values, offsets = keys[..., :kept, :], values[..., :kept, :], offsets - count
            state = (keys, values, offsets, padding, max_size, positions, kept, is_rotated)
            self._cache.state = state
        return True


_CheckpointClass: TypeAlias = type[_ColumnCheckpoint | _StateCheckpoint]


def _checkpoint_classes() -> Mapping[type, _CheckpointClass]:
    """By the class itself: what a model's own class does besides, nobody knows."""
    from mlx_lm.models.cache import (  # noqa: PLC0415 - after import_mlx_lm()
        ArraysCache,
        BatchRotatingKVCache,
        KVCache,
        RotatingKVCache,
    )

    return {
        KVCache: _ColumnCheckpoint,
        QuantizedCache: _ColumnCheckpoint,
        RotatingKVCache: _WindowCheckpoint,
        BatchRotatingKVCache: _BatchWindowCheckpoint,
        ArraysCache: _StateCheckpoint,
    }


def _is_whole(keys: mx.array, index: int, offset: int) -> bool:
    """Whether the columns before the index are a window's latest, in the order of their positions.

    They are behind a pass of several tokens, and as long as there was room for every position.
    """
    return index in (keys.shape[2], offset)


def _aliased(state: CacheState) -> CacheState:
    """The same under names of its own, which nothing that is written elsewhere changes."""
    if isinstance(state, mx.array):
        return mx.array(state)
    if isinstance(state, tuple | list):
        return [_aliased(one) for one in state]
    return state
