"""Facts of a cache are read from live objects, lists opened."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding

from machd.capabilities.facts import KvCacheKind
from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.loading.cache_facts import measure_model

import_mlx_lm()

from mlx_lm.models import llama, mamba  # noqa: E402
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache  # noqa: E402


class Mixer(Module):
    """Keeps whatever its cache is, at a known cost."""

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        """Store keys and values of two heads of four, and a state of 3 x 5."""
        keys = mx.zeros((1, 2, x.shape[1], 4))
        for each in cache.caches if isinstance(cache, CacheList) else [cache]:
            if isinstance(each, ArraysCache):
                each[0] = mx.zeros((1, 3, 5))
            else:
                each.update_and_fetch(keys, keys)
        return x


class Layer(Module):
    """One mixer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mixer = Mixer()  # type: ignore[no-untyped-call]


class Tiny(Module):
    """A model whose caches are given."""

    def __init__(self, caches: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed = Embedding(11, 6)
        self.layers = [Layer() for _ in caches]
        self._given = caches

    def make_cache(self) -> list[Any]:
        """The caches under test."""
        return self._given

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Run every mixer."""
        x: mx.array = self.embed(tokens)
        for layer, each in zip(self.layers, cache, strict=True):
            x = layer.mixer(x, each)
        return x


KV_BYTES = 2 * 2 * 4 * 4
STATE_BYTES = 3 * 5 * 4


@pytest.mark.parametrize(
    ("caches", "kind", "per_token", "per_sequence"),
    [
        ([KVCache(), KVCache()], KvCacheKind.STANDARD, 2 * KV_BYTES, 0),
        ([KVCache(), RotatingKVCache(64)], KvCacheKind.ROTATING, 2 * KV_BYTES, 0),
        ([ArraysCache(1), KVCache()], KvCacheKind.HYBRID, KV_BYTES, STATE_BYTES),
        ([ArraysCache(1)], KvCacheKind.RECURRENT, 0, STATE_BYTES),
        ([CacheList(KVCache(), ArraysCache(1))], KvCacheKind.NESTED, KV_BYTES, STATE_BYTES),
    ],
)
def test_cache_costs_are_those_of_the_live_objects(
    caches: list[Any], kind: KvCacheKind, per_token: int, per_sequence: int
) -> None:
    """Positions and state are told apart, whatever is allocated ahead."""
    facts = measure_model(Tiny(caches)).cache
    assert facts.kind is kind
    assert facts.bytes_per_token == per_token
    assert facts.bytes_per_sequence == per_sequence


def test_head_dims_are_those_of_keys_and_values() -> None:
    """State has none; caches inside lists count."""
    caches = [CacheList(KVCache(), ArraysCache(1)), RotatingKVCache(64)]
    assert measure_model(Tiny(caches)).head_dims == {4}
    assert measure_model(Tiny([ArraysCache(1)])).head_dims == frozenset()


def test_cache_abilities_are_read_from_the_cache() -> None:
    """Sink tokens, window, owner, and what is inside a list."""
    nested = CacheList(RotatingKVCache(8, keep=4), ArraysCache(1))
    rotating, listed = measure_model(Tiny([RotatingKVCache(8, keep=4), nested])).cache.layers
    assert (rotating.class_name, rotating.owner) == ("RotatingKVCache", "Mixer")
    assert (rotating.keep, rotating.window_tokens) == (4, 8)
    assert rotating.trimmable
    assert rotating.mergeable
    assert [inner.class_name for inner in listed.nested] == ["RotatingKVCache", "ArraysCache"]
    assert not listed.trimmable


def test_a_list_merges_only_if_its_caches_do() -> None:
    """``CacheList`` always has ``merge``; a cache inside it without one makes it fail."""

    class Private(KVCache):  # type: ignore[misc]
        """Has no way to merge."""

        def __getattribute__(self, name: str) -> Any:
            if name == "merge":
                raise AttributeError(name)
            return super().__getattribute__(name)

    (listed,) = measure_model(Tiny([CacheList(KVCache(), Private())])).cache.layers
    assert not listed.mergeable


def test_mlx_lms_own_models_are_told_apart() -> None:
    """A llama with sliding layers is rotating, a mamba recurrent."""
    sliding = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=32,
            num_attention_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=20,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=4,
        )
    )
    assert measure_model(sliding).cache.kind is KvCacheKind.ROTATING
    state = mamba.Model(
        mamba.ModelArgs(
            model_type="mamba",
            vocab_size=20,
            hidden_size=16,
            intermediate_size=32,
            state_size=4,
            num_hidden_layers=2,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank=2,
        )
    )
    facts = measure_model(state).cache
    assert facts.kind is KvCacheKind.RECURRENT
    assert facts.bytes_per_token == 0
    assert facts.bytes_per_sequence > 0
