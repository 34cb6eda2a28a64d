"""Caches of one row: how they grow."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from machd.engine.backend.untyped import Cache
from machd.engine.kv.layers.slab import SlabKv
from machd.engine.kv.row_caches import make_room
from machd.engine.protocol.slab_size import COLUMN_STEP


def _write(cache: Cache, tokens: int) -> int:
    """Write so many positions; returns the columns that there are then."""
    part = mx.ones((1, 1, tokens, 4))
    cache.update_and_fetch(part, part)
    return int(cache.keys.shape[2])


def test_a_prompts_caches_grow_once() -> None:
    """With room for all of it asked for, no chunk copies what those before it wrote; later ones grow as ever."""
    cache = KVCache()
    make_room([CacheList(cache, RotatingKVCache(8))], 1000)
    assert {_write(cache, 100) for _ in range(10)} == {1024}
    make_room([cache], COLUMN_STEP)
    assert _write(cache, 25) == 1000 + COLUMN_STEP


def test_a_reused_prefix_is_copied_once() -> None:
    """The rest of the prompt finds its columns behind the prefix."""
    cache = KVCache()
    held = mx.ones((1, 1, 512, 4))
    SlabKv.fill_columns(cache, (held, held), 512)
    make_room([cache], 300)
    assert {_write(cache, 100) for _ in range(3)} == {512 + 512}
