"""The caches of one row: made for a model, flattened, and read through their kinds.

A standard cache has KV arrays with a column for each position, which can be copied, cut and joined.
All others (windows, recurrent state) have only their present state. Models write into
mlx-lm's lists and arrays in place, so a state that is kept or given is copied each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import mlx.core as mx

from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kv.kv_format import PLAIN, KvFormat
from machd.engine.kv.layers.kinds import kind_of


def make_row_caches(model: LanguageModel, kv_format: KvFormat = PLAIN) -> list[Cache]:
    """Make empty caches for one row, as the model makes them, standard ones in the format."""
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - after import_mlx_lm()

    made: list[Cache] = list(make_prompt_cache(model))
    if kv_format is PLAIN:
        return made
    return [replaced(one, lambda cache: kind_of(cache).in_format(cache, kv_format)) for one in made]


def make_room(caches: Iterable[Cache], tokens: int) -> None:
    """Have standard caches' next growth make room for ``tokens`` tokens: each growth copies the cache."""
    for cache in innermost(caches):
        kind_of(cache).make_room(cache, tokens)


def is_cache_list(cache: Cache) -> bool:
    """Return True for mlx-lm's list of a layer's caches."""
    return type(cache).__name__ == "CacheList"


def innermost(caches: Iterable[Cache]) -> list[Cache]:
    """Flatten cache lists, however deep: return the caches that hold arrays, in order."""
    flattened: list[Cache] = []
    for cache in caches:
        flattened.extend(innermost(cache.caches) if is_cache_list(cache) else [cache])
    return flattened


def replaced(cache: Cache, replacement: Callable[[Cache], Cache]) -> Cache:
    """Replace a cache, or each cache inside a list, in the order of :func:`innermost`; lists stay lists."""
    from mlx_lm.models.cache import CacheList  # noqa: PLC0415 - after import_mlx_lm()

    if is_cache_list(cache):
        return CacheList(*(replaced(inner, replacement) for inner in cache.caches))
    return replacement(cache)


def kv_arrays(cache: Cache, row: int = 0, begin: int = 0) -> tuple[mx.array, ...] | None:
    """Return a row's arrays from a position on, None without columns; see ``BatchedCache.row_columns``."""
    return kind_of(cache).row_columns(cache, row, begin)
