"""Facts about a model's KV cache, read from live cache objects by ``engine/loading/cache_facts.py``.

Plain data and pure functions: the names of the classes and what they can do, never the classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class KvCacheKind(StrEnum):
    """Kind of a model's memory, judged by live objects: a configuration can change it."""

    STANDARD = "standard"
    ROTATING = "rotating"
    HYBRID_GDN = "hybrid_gdn"
    HYBRID = "hybrid"
    RECURRENT = "recurrent"
    CHUNKED = "chunked"
    COMPRESSED = "compressed"
    NESTED = "nested"


_KIND_OF_CLASS = MappingProxyType(
    {
        "KVCache": KvCacheKind.STANDARD,
        "RotatingKVCache": KvCacheKind.ROTATING,
        "ArraysCache": KvCacheKind.RECURRENT,
        "ChunkedKVCache": KvCacheKind.CHUNKED,
        "CacheList": KvCacheKind.NESTED,
    }
)
"""The rules speak of these kinds; a cache of another class is a model's private one, of which nothing is known.

``engine/kv/layers/`` has a class for each kind that can do anything, and a test holds the two together.
"""

_RESTRICTIVE = (
    KvCacheKind.NESTED,
    KvCacheKind.COMPRESSED,
    KvCacheKind.CHUNKED,
    KvCacheKind.RECURRENT,
    KvCacheKind.ROTATING,
)
"""The most restrictive first."""


@dataclass(frozen=True, slots=True)
class LayerCacheFacts:
    """One cache object.

    Attributes:
        class_name: The class, such as ``KVCache``.
        owner: The class of the module that keeps state in it, such as ``GatedDeltaNet``; empty
            where it cannot be told.
        keep: Sink tokens that a rotating cache never drops.
        window_tokens: Positions that a rotating cache holds; None without a window.
        nested: The caches inside a list.
    """

    class_name: str
    owner: str = ""
    trimmable: bool = True
    mergeable: bool = True
    keep: int = 0
    window_tokens: int | None = None
    nested: tuple[LayerCacheFacts, ...] = ()

    @property
    def kind(self) -> KvCacheKind:
        """The kind of this one cache."""
        return _KIND_OF_CLASS.get(self.class_name, KvCacheKind.COMPRESSED)


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """A whole model's cache.

    Attributes:
        layers: One entry for each cache object; fewer or more than the model has layers.
        bytes_per_token: What one more position costs in one sequence.
        bytes_per_sequence: What a sequence costs whatever its length (recurrent state).
    """

    layers: tuple[LayerCacheFacts, ...]
    bytes_per_token: int
    bytes_per_sequence: int

    @property
    def class_counts(self) -> dict[str, int]:
        """Number of cache objects of each class, by name."""
        return dict(sorted(Counter(layer.class_name for layer in self.layers).items()))

    @property
    def nested_classes(self) -> tuple[str, ...]:
        """Sorted names of the classes inside cache lists, however deep."""
        return tuple(sorted({name for layer in self.layers for name in _inner_names(layer)}))

    @property
    def every(self) -> tuple[LayerCacheFacts, ...]:
        """Every cache object, lists and what is inside them, however deep."""
        return tuple(one for layer in self.layers for one in _with_inner(layer))

    @property
    def innermost(self) -> tuple[LayerCacheFacts, ...]:
        """Every cache that holds something itself: lists opened, however deep."""
        return tuple(one for one in self.every if one.kind is not KvCacheKind.NESTED)

    @property
    def private_classes(self) -> tuple[str, ...]:
        """Sorted names of the classes that are a model's own, inside lists too."""
        private = {one.class_name for one in self.every if one.kind is KvCacheKind.COMPRESSED}
        return tuple(sorted(private))

    @property
    def keep_tokens(self) -> tuple[int, ...]:
        """Sorted numbers of sink tokens that windows keep, each once; empty without a window."""
        windows = [one for one in self.innermost if one.window_tokens is not None]
        return tuple(sorted({one.keep for one in windows}))

    @property
    def window_tokens(self) -> tuple[int, ...]:
        """Sorted sizes of the windows, each once."""
        sizes = {one.window_tokens for one in self.innermost}
        return tuple(sorted(size for size in sizes if size is not None))

    @property
    def mergeable(self) -> bool:
        """True if mlx-lm can merge every cache into a batch, which says nothing of the answers."""
        return all(layer.mergeable for layer in self.layers)

    @property
    def trimmable(self) -> bool:
        """True if every cache can be cut back to an earlier position."""
        return all(layer.trimmable for layer in self.layers)

    @property
    def has_positions_only(self) -> bool:
        """True if every cache keeps something for each position by itself, and nothing else."""
        return all(one.kind is KvCacheKind.STANDARD for one in self.innermost)

    @property
    def can_be_cut(self) -> bool:
        """True if every cache can be cut back at any length: a full window cannot."""
        return self.trimmable and not self.window_tokens

    @property
    def kind(self) -> KvCacheKind:
        """The kind as ``/v1/capabilities`` names it: the most restrictive class present decides."""
        kinds = {layer.kind for layer in self.layers}
        if kinds == {KvCacheKind.RECURRENT}:
            return KvCacheKind.RECURRENT
        found = next((kind for kind in _RESTRICTIVE if kind in kinds), KvCacheKind.STANDARD)
        return self._hybrid_kind if found is KvCacheKind.RECURRENT else found

    @property
    def _hybrid_kind(self) -> KvCacheKind:
        owners = {one.owner for one in self.layers if one.kind is KvCacheKind.RECURRENT}
        is_gdn = all("GatedDelta" in owner for owner in owners)
        return KvCacheKind.HYBRID_GDN if is_gdn else KvCacheKind.HYBRID


def _with_inner(layer: LayerCacheFacts) -> Iterator[LayerCacheFacts]:
    yield layer
    for inner in layer.nested:
        yield from _with_inner(inner)


def _inner_names(layer: LayerCacheFacts) -> Iterator[str]:
    for inner in layer.nested:
        yield inner.class_name
        yield from _inner_names(inner)
