"""The table of kinds: which class holds a cache of the model in a batch, by the exact class of one row's cache.

A model's own subclass of a known cache may do anything besides, so it is a :class:`MergedKv` as any other class.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache as once

from machd.engine.backend.untyped import Cache
from machd.engine.kv.layers.batched_cache import LayerKv
from machd.engine.kv.layers.merged import MergedKv
from machd.engine.kv.layers.slab import SlabCache
from machd.engine.kv.layers.state import StateKv
from machd.engine.kv.layers.window import WindowSlab
from machd.engine.kv.quantized_cache import QuantizedCache


def kind_of(cache: Cache) -> type[LayerKv]:
    """Return the kind of an innermost cache, of one row or of a batch."""
    return type(cache) if isinstance(cache, LayerKv) else _kinds().get(type(cache), MergedKv)


@once
def _kinds() -> Mapping[type, type[LayerKv]]:
    from mlx_lm.models.cache import (  # noqa: PLC0415 - after import_mlx_lm()
        ArraysCache,
        KVCache,
        RotatingKVCache,
    )

    return {
        KVCache: SlabCache,
        QuantizedCache: SlabCache,
        RotatingKVCache: WindowSlab,
        ArraysCache: StateKv,
    }
