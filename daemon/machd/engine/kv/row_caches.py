"""What a row's caches hold for each of its positions, whatever class they are of.

Standard caches keep something for every position by itself, which can be copied, cut and put
together. All others (windows, recurrent state) are known only as they are now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from machd.engine.backend.untyped import Cache, LanguageModel
from machd.engine.kv.formats import PLAIN
from machd.engine.kv.kv_format import KvFormat
from machd.engine.kv.quantized_cache import QuantizedCache
from machd.engine.kv.slab import SlabCache


@dataclass(frozen=True, slots=True)
class CachedRow:
    """A row and how far it is computed.

    Attributes:
        caches: One for each cache of the model, of this row or of several.
        index: Its row in them.
        length: Positions that are computed and known to be sound.
        is_exact: Whether the caches have no more than these, so that their state is of there.
    """

    caches: Sequence[Cache]
    index: int
    length: int
    is_exact: bool


def make_row_caches(model: LanguageModel, kv_format: KvFormat = PLAIN) -> list[Cache]:
    """Empty caches for one row, as the model makes them, standard ones in the format."""
    from mlx_lm.models.cache import make_prompt_cache  # noqa: PLC0415 - after import_mlx_lm()

    return [_in_format(cache, kv_format) for cache in make_prompt_cache(model)]


def _in_format(cache: Cache, kv_format: KvFormat) -> Cache:
    """The empty cache, or a coded one where the format is of its class."""
    from mlx_lm.models.cache import CacheList, KVCache  # noqa: PLC0415 - after import_mlx_lm()

    if kv_format is PLAIN:
        return cache
    if type(cache) is CacheList:
        return CacheList(*(_in_format(inner, kv_format) for inner in cache.caches))
    return QuantizedCache(kv_format) if type(cache) is KVCache else cache


def innermost(caches: Iterable[Cache]) -> list[Cache]:
    """The caches that hold something themselves, lists opened, however deep."""
    opened: list[Cache] = []
    for cache in caches:
        is_list = type(cache).__name__ == "CacheList"
        opened.extend(innermost(cache.caches) if is_list else [cache])
    return opened


def kv_arrays(cache: Cache) -> tuple[mx.array, ...] | None:
    """The arrays [rows, heads, columns, n] that have a column for each position, keys' first.

    There may be more columns than positions, and nothing is said of what they hold. Empty where no
    position was ever written; None for a cache that keeps no positions one by one.
    """
    from mlx_lm.models.cache import KVCache  # noqa: PLC0415 - after import_mlx_lm()

    if isinstance(cache, SlabCache | QuantizedCache):
        return tuple(cache.arrays)
    if type(cache) is KVCache:
        return () if cache.keys is None else (cache.keys, cache.values)
    return None


def format_of(cache: Cache) -> KvFormat:
    """The format of a cache's arrays."""
    is_coded = isinstance(cache, SlabCache | QuantizedCache)
    kv_format: KvFormat = cache.kv_format if is_coded else PLAIN
    return kv_format


def fill_kv_arrays(cache: Cache, arrays: Sequence[mx.array], length: int) -> None:
    """Put positions into an empty cache of one row that :func:`make_row_caches` made.

    Args:
        cache: Of a class that has arrays.
        arrays: [1, heads, length, n] each, as :func:`kv_arrays` orders them; none of a layer that
            never has any.
        length: Positions.
    """
    if isinstance(cache, QuantizedCache):
        cache.arrays = list(arrays)
    elif arrays:
        cache.keys, cache.values = arrays
    cache.offset = length
