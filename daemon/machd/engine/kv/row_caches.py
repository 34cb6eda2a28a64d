"""The caches of one row: made for a model, and read as arrays or as state.

A standard cache keeps something for each position, which can be copied, cut and joined: its KV arrays.
All others (windows, recurrent state) are known only as they are now: their state. Models write into
mlx-lm's lists and arrays in place, so a state that is kept or given is copied each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.kv.quantized_cache import FormatCache, QuantizedCache
from machd.engine.kv.window_slab import RowWindow, WindowSlab
from machd.engine.protocol.slab_size import COLUMN_STEP


def make_row_caches(model: LanguageModel, kv_format: KvFormat = PLAIN) -> list[Cache]:
    """Make empty caches for one row, as the model makes them, standard ones in the format."""
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - after import_mlx_lm()

    return [_in_format(cache, kv_format) for cache in make_prompt_cache(model)]


def _in_format(cache: Cache, kv_format: KvFormat) -> Cache:
    from mlx_lm.models.cache import CacheList, KVCache  # noqa: PLC0415 - after import_mlx_lm()

    if kv_format is PLAIN:
        return cache
    if type(cache) is CacheList:
        return CacheList(*(_in_format(inner, kv_format) for inner in cache.caches))
    return QuantizedCache(kv_format) if type(cache) is KVCache else cache


def make_room(caches: Iterable[Cache], tokens: int) -> None:
    """Have standard caches grow for so many tokens when they grow next: what they hold is copied each time."""
    from mlx_lm.models.cache import KVCache  # noqa: PLC0415 - after import_mlx_lm()

    for cache in innermost(caches):
        if type(cache) is KVCache:
            cache.step = -(-tokens // COLUMN_STEP) * COLUMN_STEP


def is_cache_list(cache: Cache) -> bool:
    """Return True for mlx-lm's list of a layer's caches."""
    return type(cache).__name__ == "CacheList"


def innermost(caches: Iterable[Cache]) -> list[Cache]:
    """Return the caches that hold arrays themselves, lists opened, however deep."""
    opened: list[Cache] = []
    for cache in caches:
        opened.extend(innermost(cache.caches) if is_cache_list(cache) else [cache])
    return opened


def kv_arrays(cache: Cache, row: int = 0, begin: int = 0) -> tuple[mx.array, ...] | None:
    """Return a row's arrays [1, heads, columns, n] with a column for each position from ``begin`` on, keys first.

    There may be more columns than positions, with any content. Empty before the first write; None for
    a cache without a column for each position.
    """
    from mlx_lm.models.cache import KVCache  # noqa: PLC0415 - after import_mlx_lm()

    if isinstance(cache, FormatCache):
        return cache.row_arrays(row, begin)
    if type(cache) is KVCache:
        held = () if cache.keys is None else (cache.keys, cache.values)
        return tuple(array[row : row + 1, :, begin:] for array in held)
    return None


def window_arrays(cache: Cache) -> tuple[mx.array, ...]:
    """Return keys and values [1, heads, columns, n] of a row's window, in order of position.

    No more columns than the window has positions; none before the first write.

    Args:
        cache: mlx-lm's window of one row, without sinks.
    """
    keys, values, _, _, _, index = _window(cache.state)
    if keys is None or values is None:
        return ()
    if index < keys.shape[2]:  # the oldest position lies where the next one goes
        keys, values = (mx.roll(one, -index, 2) for one in (keys, values))
    return keys, values


def format_of(cache: Cache) -> KvFormat:
    """Return the format of a cache's KV arrays."""
    return cache.kv_format if isinstance(cache, FormatCache) else PLAIN


def fill_kv_arrays(cache: Cache, arrays: Sequence[mx.array], length: int) -> None:
    """Put positions into an empty cache of one row that :func:`make_row_caches` made.

    Args:
        cache: A cache of a class that has KV arrays.
        arrays: [1, heads, length, n] each, as :func:`kv_arrays` orders them; none for a layer that
            never has any.
        length: Positions.
    """
    if isinstance(cache, QuantizedCache):
        cache.arrays = list(arrays)
    elif arrays:
        cache.keys, cache.values = arrays
    cache.offset = length


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Shape and dtype of an array in a state."""

    shape: tuple[int, ...]
    dtype: mx.Dtype


CacheState: TypeAlias = "mx.array | ArrayShape | int | float | str | Sequence[CacheState] | None"
"""``state`` of mlx-lm's caches: arrays and numbers in tuples and lists."""


def row_state(cache: Cache, index: int) -> CacheState:
    """Copy the state of one row, such that a cache of one row can take it.

    Args:
        cache: An innermost cache without KV arrays; of one row, or of a batch as machd makes it.
        index: The row's place in it.
    """
    from mlx_lm.models.cache import (  # noqa: PLC0415 - after import_mlx_lm()
        ArraysCache,
        RotatingKVCache,
    )

    if type(cache) is ArraysCache:
        rows = [None if one is None else one[index : index + 1] for one in cache.cache]
        return copied((rows, None, None))
    if isinstance(cache, WindowSlab):
        return cache.row_state(index)
    assert index == 0, "a cache of another class has one row"
    if type(cache) is RotatingKVCache:
        return copied(_window(cache.state))
    return copied(cache.state)


def copied(state: CacheState) -> CacheState:
    """Copy a state, arrays and lists included."""
    if isinstance(state, mx.array):
        flat = state.reshape(-1)
        # Of one array, concatenate gives the array itself, which may be a part of a larger one.
        return mx.concatenate([flat[:0], flat]).reshape(state.shape)
    if isinstance(state, tuple | list):
        return [copied(one) for one in state]
    return state


def arrays_in(state: CacheState) -> Iterator[mx.array]:
    """Yield a state's arrays, in order."""
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, tuple | list):
        for one in state:
            yield from arrays_in(one)


def shape_of(state: CacheState) -> CacheState:
    """Replace a state's arrays with their :class:`ArrayShape`."""
    if isinstance(state, mx.array):
        return ArrayShape(tuple(state.shape), state.dtype)
    if isinstance(state, tuple | list):
        return [shape_of(one) for one in state]
    return state


def is_like(state: CacheState, shape: CacheState) -> bool:
    """Return True if a state can be one of the caches that once had a state of this shape.

    Numbers may differ, and so may how full a window or a history is, and arrays that are not there yet.
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


def _window(state: RowWindow) -> RowWindow:
    """Return a rotating cache's state without columns that it is about to drop or has not filled yet."""
    keys, values, offset, keep, max_size, index = state  # keys and values [1, heads, columns, n]
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
