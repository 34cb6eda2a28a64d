"""What a row's caches hold for each of its positions, whatever class they are of.

Standard caches keep something for every position by itself, which can be copied, cut and put
together. All others (windows, recurrent state) are known only as they are now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from machd.engine.kv_format import PLAIN, KvFormat
from machd.engine.slab import SlabCache
from machd.engine.untyped import Cache, LanguageModel

__all__ = ["fill_planes", "innermost", "make_row_caches", "planes_of"]


def make_row_caches(model: LanguageModel, kv_format: KvFormat = PLAIN) -> list[Cache]:
    """Empty caches for one row, as the model makes them, standard ones in the format."""
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - after import_mlx_lm()

    assert kv_format is PLAIN, "no other format exists yet"
    return list(make_prompt_cache(model))


def innermost(caches: Iterable[Cache]) -> list[Cache]:
    """The caches that hold something themselves, lists opened, however deep."""
    opened: list[Cache] = []
    for cache in caches:
        is_list = type(cache).__name__ == "CacheList"
        opened.extend(innermost(cache.caches) if is_list else [cache])
    return opened


def planes_of(cache: Cache) -> tuple[mx.array, ...] | None:
    """The arrays [rows, heads, columns, n] that have a column for each position, keys' first.

    There may be more columns than positions, and nothing is said of what they hold. Empty where no
    position was ever written; None for a cache that keeps no positions one by one.
    """
    from mlx_lm.models.cache import KVCache  # noqa: PLC0415 - after import_mlx_lm()

    if isinstance(cache, SlabCache) or type(cache) is KVCache:
        return () if cache.keys is None else (cache.keys, cache.values)
    return None


def fill_planes(cache: Cache, planes: Sequence[mx.array], length: int) -> None:
    """Put positions into an empty cache of one row that :func:`make_row_caches` made.

    Args:
        cache: Of a class that has planes.
        planes: [1, heads, length, n] each, as :func:`planes_of` orders them; none of a layer that
            never has any.
        length: Positions.
    """
    if planes:
        cache.keys, cache.values = planes
    cache.offset = length
