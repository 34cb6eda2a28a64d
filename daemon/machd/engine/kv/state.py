"""What caches without positions hold for a row, as it is now: windows, recurrent state.

mlx-lm's caches give all they are as ``state``, arrays and numbers in tuples and lists, and take it
back the same way. Models write into those lists and arrays in place, so what is kept or given is
copied each time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from machd.engine.backend.untyped import Cache


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Stands for an array of which only this matters."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


CacheState: TypeAlias = "mx.array | ArrayShape | int | float | str | Sequence[CacheState] | None"
"""Arrays, numbers and nothing, nested."""


def row_state(cache: Cache, index: int) -> CacheState:
    """A copy of the state of one row, such that a cache of one row can take it.

    Args:
        cache: Innermost, without positions; of one row, or of a batch as machd makes it.
        index: The row in it.
    """
    from mlx_lm.models.cache import (  # noqa: PLC0415 - after import_mlx_lm()
        ArraysCache,
        BatchRotatingKVCache,
        RotatingKVCache,
    )

    if type(cache) is ArraysCache:
        rows = [None if one is None else one[index : index + 1] for one in cache.cache]
        return copied((rows, None, None))
    if type(cache) is BatchRotatingKVCache:
        cache = RotatingKVCache(cache.max_size) if cache.keys is None else cache.extract(index)
    else:
        assert index == 0, "a cache of another class has one row"
    if type(cache) is RotatingKVCache:
        return copied(_window(cache.state))
    return copied(cache.state)


def copied(state: CacheState) -> CacheState:
    """The same with arrays and lists of its own."""
    if isinstance(state, mx.array):
        return _copied_array(state)
    if isinstance(state, tuple | list):
        return [copied(one) for one in state]
    return state


def _copied_array(array: mx.array) -> mx.array:
    """The same in memory of its own, whatever it was a part of."""
    flat = array.reshape(-1)
    # Of one array, concatenate gives the array itself.
    return mx.concatenate([flat[:0], flat]).reshape(array.shape)


def arrays_in(state: CacheState) -> Iterator[mx.array]:
    """All arrays, in order."""
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, tuple | list):
        for one in state:
            yield from arrays_in(one)


def shape_of(state: CacheState) -> CacheState:
    """The same with :class:`ArrayShape` for arrays."""
    if isinstance(state, mx.array):
        return ArrayShape(tuple(state.shape), state.dtype)
    if isinstance(state, tuple | list):
        return [shape_of(one) for one in state]
    return state


def is_like(state: CacheState, shape: CacheState) -> bool:
    """Whether a state can be one of the caches that once had a state of this shape.

    How full a window or a history is may differ, and so may numbers; that arrays come where there
    were none yet, too.
    """
    if isinstance(shape, ArrayShape):
        return isinstance(state, mx.array) and _is_array_like(state, shape)
    if isinstance(shape, tuple | list):
        return (
            isinstance(state, tuple | list)
            and len(state) == len(shape)
            and all(is_like(one, other) for one, other in zip(state, shape, strict=True))
        )
    if shape is None:
        return state is None or isinstance(state, mx.array)
    return type(state) is type(shape)


def _is_array_like(array: mx.array, like: ArrayShape) -> bool:
    if array.dtype != like.dtype or array.ndim != len(like.shape):
        return False
    free = -1 if mx.issubdtype(array.dtype, mx.integer) else -2
    axes = set(range(array.ndim)) - ({array.ndim + free} if array.ndim > 1 else set())
    return all(array.shape[axis] == like.shape[axis] for axis in axes)


def _window(state: tuple[mx.array | None, mx.array | None, int, int, int, int]) -> CacheState:
    """A rotating cache's state without columns that it is about to drop or has not filled yet."""
    keys, values, offset, keep, max_size, index = state
    if keys is None or values is None:
        return state
    extra = keys.shape[2] - max_size
    if extra > 0:
        # After several tokens at once it has more than its window, in their order.
        keys, values = (
            mx.concatenate([one[..., :keep, :], one[..., extra + keep :, :]], axis=2)
            for one in (keys, values)
        )
        index = max_size
    elif offset < keys.shape[2]:
        keys, values = keys[..., :offset, :], values[..., :offset, :]
        index = offset
    return keys, values, offset, keep, max_size, index
