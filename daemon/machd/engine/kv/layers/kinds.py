"""The table of kinds: which class holds a cache of the model in a batch, by the exact class of one row's cache.

A model's own subclass of a known cache may override anything, so it is a :class:`MergedKv`, as every class that is
not in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache as once

from machd.engine.backend.untyped import Cache
from machd.engine.kv.layers.batched_cache import BatchedCache
from machd.engine.kv.layers.merged import MergedKv
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.layers.state import StateKv
from machd.engine.kv.layers.window import WindowKv
from machd.engine.kv.quantized_cache import QuantizedCache


def kind_of(cache: Cache) -> type[BatchedCache]:
    """Return the kind of an innermost cache, of one row or of a batch."""
    return type(cache) if isinstance(cache, BatchedCache) else _kinds().get(type(cache), MergedKv)


@once
def _kinds() -> Mapping[type, type[BatchedCache]]:
    from mlx_lm.models.cache import (  # noqa: PLC0415 - after import_mlx_lm()
        ArraysCache,
        KVCache,
        RotatingKVCache,
    )

    return {
        KVCache: SlabKv,
        QuantizedCache: SlabKv,
        RotatingKVCache: WindowKv,
        ArraysCache: StateKv,
    }
