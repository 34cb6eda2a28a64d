"""Facts about a model's KV cache, read from live cache objects by ``engine/loading/cache_facts.py``.

Plain data and pure functions: the names of the classes and what they can do, never the classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

_STANDARD = "KVCache"
_ROTATING = "RotatingKVCache"
_STATE = "ArraysCache"
_CHUNKED = "ChunkedKVCache"
_LIST = "CacheList"
PUBLIC_CACHE_CLASSES = frozenset({_STANDARD, _ROTATING, _STATE, _CHUNKED, _LIST})
"""mlx-lm's own; a cache of another class is a model's private one."""


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
        return tuple(one for one in self.every if one.class_name != _LIST)

    @property
    def private_classes(self) -> tuple[str, ...]:
        """Sorted names of the classes that are a model's own, inside lists too."""
        return tuple(sorted({one.class_name for one in self.every} - PUBLIC_CACHE_CLASSES))

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
        return all(one.class_name == _STANDARD for one in self.innermost)

    @property
    def can_be_cut(self) -> bool:
        """True if every cache can be cut back at any length: a full window cannot."""
        return self.trimmable and not self.window_tokens

    @property
    def kind(self) -> KvCacheKind:
        """The kind as ``/v1/capabilities`` names it: the most restrictive class present decides."""
        names = {layer.class_name for layer in self.layers}
        if _LIST in names:
            return KvCacheKind.NESTED
        if names - PUBLIC_CACHE_CLASSES:
            return KvCacheKind.COMPRESSED
        if _CHUNKED in names:
            return KvCacheKind.CHUNKED
        if _STATE in names:
            return self._state_kind(names)
        if _ROTATING in names:
            return KvCacheKind.ROTATING
        return KvCacheKind.STANDARD

    def _state_kind(self, names: set[str]) -> KvCacheKind:
        if names == {_STATE}:
            return KvCacheKind.RECURRENT
        owners = {layer.owner for layer in self.layers if layer.class_name == _STATE}
        if owners and all("GatedDelta" in owner for owner in owners):
            return KvCacheKind.HYBRID_GDN
        return KvCacheKind.HYBRID


def _with_inner(layer: LayerCacheFacts) -> Iterator[LayerCacheFacts]:
    yield layer
    for inner in layer.nested:
        yield from _with_inner(inner)


def _inner_names(layer: LayerCacheFacts) -> Iterator[str]:
    for inner in layer.nested:
        yield inner.class_name
        yield from _inner_names(inner)
