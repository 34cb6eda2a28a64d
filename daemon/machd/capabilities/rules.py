"""From facts to verdicts: one predicate for each feature, read by every surface that speaks of it.

A rule may say "unknown". That a cache can be merged proves nothing about the model that fills it:
of the architectures that mlx-lm merges without complaint, some answer wrongly in a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from machd.capabilities.facts import (
    PUBLIC_CACHE_CLASSES,
    CacheFacts,
    KvCacheKind,
    LayerCacheFacts,
)

__all__ = ["Support", "Verdict", "continuous_batching"]


class Support(StrEnum):
    """Whether a feature works with a model."""

    SUPPORTED = "supported"
    BLOCKED = "blocked"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rule's answer, and why that is the answer, for a person who wants to do something."""

    support: Support
    reason: str


_MEASURE = "requests are served one at a time until it has been measured"
_ALONE = "requests are served one at a time"

_UNKNOWN = MappingProxyType(
    {
        KvCacheKind.ROTATING: "layers keep a sliding window, and whether rows with windows of different "
        "length answer as they would alone is not known from the cache",
        KvCacheKind.HYBRID: "layers keep recurrent state, and whether padding of shorter prompts leaks "
        "into it depends on the model's code",
        KvCacheKind.RECURRENT: "every layer keeps recurrent state, and whether padding of shorter "
        "prompts leaks into it depends on the model's code",
        KvCacheKind.NESTED: "layers keep several caches each, and how the model uses them in a batch is "
        "not known from the caches",
    }
)


def continuous_batching(facts: CacheFacts) -> Verdict:
    """Whether rows of different length can share a batch and each get what it would get alone.

    Judged by the most restrictive cache anywhere, inside cache lists too.
    """
    return _blocked(facts) or _by_kind(facts)


def _blocked(facts: CacheFacts) -> Verdict | None:
    every = tuple(_every_layer(facts.layers))
    private = tuple(one for one in every if one.class_name not in PUBLIC_CACHE_CLASSES)
    if private:
        return _no(
            f"the model keeps a cache class of its own ({_names(private)}), and nothing is known "
            "about merging it into a batch"
        )
    if any(layer.class_name == "ChunkedKVCache" for layer in every):
        return _no("layers attend in chunks (ChunkedKVCache), which mlx-lm cannot merge")
    if any(layer.keep for layer in every):
        return _no(
            "a rotating cache keeps the first tokens for good (attention sinks), and merging it "
            "loses them"
        )
    unmergeable = tuple(layer for layer in every if not layer.mergeable)
    if unmergeable:
        return _no(f"mlx-lm cannot merge caches of {_names(unmergeable)} into a batch")
    return None


def _by_kind(facts: CacheFacts) -> Verdict:
    """The verdict on caches that all can be merged."""
    windows = any(layer.window_tokens is not None for layer in _every_layer(facts.layers))
    kind = facts.kind
    if not facts.layers:
        return _open("the model keeps no cache that could be judged")
    if kind is KvCacheKind.STANDARD:
        return Verdict(
            Support.SUPPORTED,
            "every layer keeps a standard KV cache, which a batch keeps row by row",
        )
    if kind is KvCacheKind.HYBRID_GDN and not windows:
        return Verdict(
            Support.SUPPORTED,
            "gated-delta-net state beside standard KV caches: both are kept row by row, and padding "
            "is masked out of the state",
        )
    # Gated-delta-net beside windows is as unknown as the windows are.
    return _open(_UNKNOWN.get(kind, _UNKNOWN[KvCacheKind.ROTATING]))


def _no(reason: str) -> Verdict:
    return Verdict(Support.BLOCKED, f"{reason}; {_ALONE}")


def _open(reason: str) -> Verdict:
    return Verdict(Support.UNKNOWN, f"{reason}; {_MEASURE}")


def _every_layer(layers: Iterable[LayerCacheFacts]) -> Iterator[LayerCacheFacts]:
    for layer in layers:
        yield layer
        yield from _every_layer(layer.nested)


def _names(layers: Iterable[LayerCacheFacts]) -> str:
    return ", ".join(sorted({layer.class_name for layer in layers}))
