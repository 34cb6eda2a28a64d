"""mlx-lm's ``state`` of a cache without columns: copied, compared, and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx
from mlx.utils import tree_map

from machd.engine.backend.untyped import Cache


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Shape and dtype of an array in a state."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


CacheState: TypeAlias = "mx.array | ArrayShape | int | float | str | Sequence[CacheState] | None"
"""``state`` of mlx-lm's caches: arrays and numbers in tuples and lists."""


def copied(state: CacheState) -> CacheState:
    """Copy a state, arrays and lists included."""
    return _mapped(_copied, state)


def _copied(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    # Of one array, concatenate gives the array itself, which may be a part of a larger one.
    return mx.concatenate([flat[:0], flat]).reshape(array.shape)


def _mapped(change: Callable[[mx.array], CacheState], state: CacheState) -> CacheState:
    """Return a state like this one with other arrays, in lists of its own."""
    changed: CacheState = tree_map(
        lambda leaf: change(leaf) if isinstance(leaf, mx.array) else leaf, state
    )
    return changed


def move_rows(arrays: Sequence[mx.array], order: Sequence[int]) -> None:
    """Write the rows of ``order`` to the first places of arrays [rows, ...]; only rows that change their place."""
    moving = [(place, row) for place, row in enumerate(order) if place != row]
    copies = [[mx.contiguous(array[row : row + 1]) for _, row in moving] for array in arrays]
    # Evaluated first: mlx would otherwise copy each array at its write, for the pending reads.
    mx.eval(copies)
    for array, rows in zip(arrays, copies, strict=True):
        for (place, _), one in zip(moving, rows, strict=True):
            array[place : place + 1] = one


def arrays_in(state: CacheState) -> Iterator[mx.array]:
    """Yield a state's arrays, in order."""
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, tuple | list):
        for one in state:
            yield from arrays_in(one)


def shape_of(state: CacheState) -> CacheState:
    """Replace a state's arrays with their :class:`ArrayShape`."""
    return _mapped(lambda array: ArrayShape(tuple(array.shape), array.dtype), state)


def is_like(state: CacheState, shape: CacheState) -> bool:
    """Return True if a state can be one of the caches that once had a state of this shape.

    Numbers may differ, a window or a history may be less full, and arrays may still be missing.
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
    # The free axis is that of tokens: [rows, tokens] of a history, [..., columns, n] of a window.
    free = -1 if mx.issubdtype(array.dtype, mx.integer) else -2
    axes = set(range(array.ndim)) - ({array.ndim + free} if array.ndim > 1 else set())
    return all(array.shape[axis] == like.shape[axis] for axis in axes)


class StateCheckpoint:
    """The state of a cache before a pass, which copies nothing.

    ``mx.array(a)`` is another name for what ``a`` holds now, and mlx writes into memory in place only where
    an array has one name, and into a copy otherwise. Windows and states get new arrays in a pass of several
    tokens anyway.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._state = _mapped(_aliased, cache.state)

    def cut(self, count: int) -> bool:
        """Refuse, unless there is nothing to drop."""
        return not count

    def restore(self) -> None:
        """Give the cache its state at the checkpoint."""
        self._cache.state = self._state


def _aliased(array: mx.array) -> mx.array:
    """Return an array under a name of its own, safe from writes under other names."""
    return mx.array(array)
