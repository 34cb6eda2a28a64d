"""The rule on continuous batching: what every kind of cache gets, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machd.capabilities.facts import CacheFacts, KvCacheKind, LayerCacheFacts
from machd.capabilities.rules import Support, continuous_batching

KV = LayerCacheFacts("KVCache", owner="Attention")
ROTATING = LayerCacheFacts("RotatingKVCache", owner="Attention", window_tokens=128)
SINKS = replace(ROTATING, keep=4)
GATED_DELTA = LayerCacheFacts("ArraysCache", owner="Qwen3NextGatedDeltaNet", trimmable=False)
MAMBA = LayerCacheFacts("ArraysCache", owner="MambaMixer", trimmable=False)
CHUNKED = LayerCacheFacts("ChunkedKVCache", owner="Attention", mergeable=False)
PRIVATE = LayerCacheFacts("LayerCache", owner="Attention", mergeable=False)


def _nested(*inner: LayerCacheFacts) -> LayerCacheFacts:
    return LayerCacheFacts("CacheList", trimmable=False, nested=inner)


def _facts(*layers: LayerCacheFacts) -> CacheFacts:
    return CacheFacts(layers, bytes_per_token=1, bytes_per_sequence=0)


_TABLE = [
    ([KV, KV], KvCacheKind.STANDARD, Support.SUPPORTED, "standard KV cache"),
    ([GATED_DELTA, KV], KvCacheKind.HYBRID_GDN, Support.SUPPORTED, "gated-delta-net"),
    ([GATED_DELTA, ROTATING], KvCacheKind.HYBRID_GDN, Support.UNKNOWN, "sliding window"),
    ([KV, ROTATING], KvCacheKind.ROTATING, Support.UNKNOWN, "sliding window"),
    ([KV, SINKS], KvCacheKind.ROTATING, Support.BLOCKED, "attention sinks"),
    ([GATED_DELTA, SINKS], KvCacheKind.HYBRID_GDN, Support.BLOCKED, "attention sinks"),
    ([MAMBA, KV], KvCacheKind.HYBRID, Support.UNKNOWN, "recurrent state"),
    ([MAMBA, GATED_DELTA, KV], KvCacheKind.HYBRID, Support.UNKNOWN, "recurrent state"),
    ([MAMBA], KvCacheKind.RECURRENT, Support.UNKNOWN, "recurrent state"),
    ([GATED_DELTA], KvCacheKind.RECURRENT, Support.UNKNOWN, "recurrent state"),
    ([CHUNKED, KV], KvCacheKind.CHUNKED, Support.BLOCKED, "ChunkedKVCache"),
    ([PRIVATE, KV], KvCacheKind.COMPRESSED, Support.BLOCKED, "LayerCache"),
    ([replace(PRIVATE, mergeable=True)], KvCacheKind.COMPRESSED, Support.BLOCKED, "LayerCache"),
    ([_nested(KV, KV)], KvCacheKind.NESTED, Support.UNKNOWN, "several caches"),
    ([_nested(MAMBA, KV), KV], KvCacheKind.NESTED, Support.UNKNOWN, "several caches"),
    ([_nested(KV, CHUNKED)], KvCacheKind.NESTED, Support.BLOCKED, "ChunkedKVCache"),
    ([_nested(KV, _nested(PRIVATE))], KvCacheKind.NESTED, Support.BLOCKED, "LayerCache"),
    ([_nested(KV, SINKS)], KvCacheKind.NESTED, Support.BLOCKED, "attention sinks"),
    ([], KvCacheKind.STANDARD, Support.UNKNOWN, "no cache"),
]


@pytest.mark.parametrize(
    ("layers", "kind", "support", "words"),
    _TABLE,
)
def test_every_kind_has_its_verdict(
    layers: list[LayerCacheFacts], kind: KvCacheKind, support: Support, words: str
) -> None:
    """The most restrictive cache anywhere decides, in any order, and the reason names it."""
    for facts in (_facts(*layers), _facts(*reversed(layers))):
        verdict = continuous_batching(facts)

        assert facts.kind is kind
        assert verdict.support is support
        assert words in verdict.reason


def test_the_table_has_every_kind() -> None:
    """No kind of the contract is left without a verdict."""
    assert {row[1] for row in _TABLE} == set(KvCacheKind)


@pytest.mark.parametrize("layer", [KV, ROTATING, GATED_DELTA, MAMBA])
def test_what_cannot_be_merged_is_blocked_wherever_it_lies(layer: LayerCacheFacts) -> None:
    """One cache without a merge, in a list of lists too, would fail inside a step."""
    broken = replace(layer, mergeable=False)
    unmergeable_list = replace(_nested(layer), mergeable=False)
    for layers in ([KV, broken], [_nested(KV, _nested(broken))], [unmergeable_list]):
        verdict = continuous_batching(_facts(*layers))

        assert verdict.support is Support.BLOCKED
        assert "cannot merge" in verdict.reason


def test_what_is_not_supported_says_what_is_done_instead() -> None:
    """A person who reads the reason learns that requests are still served, one at a time."""
    for layers, _, support, _ in _TABLE:
        reason = continuous_batching(_facts(*layers)).reason

        assert not reason.endswith(".")
        assert ("one at a time" in reason) == (support is not Support.SUPPORTED)
