"""The rules: what every kind of cache gets of every feature, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import UNSET

from machd.capabilities.batching_rules import batched_specdec, continuous_batching
from machd.capabilities.facts import CacheFacts, KvCacheKind, LayerCacheFacts
from machd.capabilities.rules import (
    PrefixExtent,
    chunked_prefill,
    kv_quantization,
    prefix_cache,
    speculation,
)
from machd.capabilities.verdict import Source, Support, Verdict

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
    """The reason says that requests are still served, one at a time."""
    for layers, _, support, _ in _TABLE:
        reason = continuous_batching(_facts(*layers)).reason

        assert not reason.endswith(".")
        assert ("one at a time" in reason) == (support is not Support.SUPPORTED)


# --- the other features -------------------------------------------------------------------------

_STANDARD = [KV, KV]
_WINDOWS = [KV, ROTATING]
_GDN = [GATED_DELTA, KV]
_HYBRID = [MAMBA, KV]
_CHUNKED = [CHUNKED, KV]
_PRIVATE = [replace(PRIVATE, trimmable=False), KV]
_LISTS = [LayerCacheFacts("CacheList", nested=(KV, KV))]

_FEATURES: list[tuple[Callable[[CacheFacts], Verdict], list[LayerCacheFacts], Support, str]] = [
    (chunked_prefill, _STANDARD, Support.SUPPORTED, "chunks"),
    (chunked_prefill, _WINDOWS, Support.SUPPORTED, "chunks"),
    (chunked_prefill, _GDN, Support.SUPPORTED, "chunks"),
    (chunked_prefill, _HYBRID, Support.UNKNOWN, "recurrent state"),
    (chunked_prefill, [MAMBA], Support.UNKNOWN, "recurrent state"),
    (chunked_prefill, _CHUNKED, Support.UNKNOWN, "ChunkedKVCache"),
    (chunked_prefill, _PRIVATE, Support.UNKNOWN, "LayerCache"),
    (chunked_prefill, _LISTS, Support.UNKNOWN, "KVCache"),
    (chunked_prefill, [], Support.UNKNOWN, "no cache"),
    (speculation, _STANDARD, Support.SUPPORTED, "cut back"),
    (speculation, _WINDOWS, Support.SUPPORTED, "cut back"),
    (speculation, _GDN, Support.SUPPORTED, "copy"),
    (speculation, _HYBRID, Support.SUPPORTED, "copy"),
    (speculation, [MAMBA], Support.SUPPORTED, "copy"),
    (speculation, _CHUNKED, Support.BLOCKED, "ChunkedKVCache"),
    (speculation, _PRIVATE, Support.BLOCKED, "LayerCache"),
    (speculation, [replace(PRIVATE, trimmable=True)], Support.BLOCKED, "LayerCache"),
    (speculation, _LISTS, Support.SUPPORTED, "cut back"),
    (speculation, [], Support.UNKNOWN, "no cache"),
    (kv_quantization, _STANDARD, Support.SUPPORTED, "all 2 caches are standard"),
    (kv_quantization, _WINDOWS, Support.SUPPORTED, "1 of 2 caches"),
    (kv_quantization, [ROTATING], Support.BLOCKED, "sliding window"),
    (kv_quantization, _GDN, Support.SUPPORTED, "1 of 2 caches"),
    (kv_quantization, _HYBRID, Support.UNKNOWN, "1 of 2 caches"),
    (kv_quantization, [MAMBA, ROTATING], Support.BLOCKED, "sliding window"),
    (kv_quantization, [MAMBA], Support.BLOCKED, "no keys and values"),
    (kv_quantization, _CHUNKED, Support.BLOCKED, "ChunkedKVCache"),
    (kv_quantization, _PRIVATE, Support.BLOCKED, "LayerCache"),
    (kv_quantization, _LISTS, Support.UNKNOWN, "KVCache"),
    (kv_quantization, [_nested(KV, ROTATING)], Support.UNKNOWN, "1 of 2 caches"),
    (kv_quantization, [], Support.UNKNOWN, "no cache"),
]


@pytest.mark.parametrize(("rule", "layers", "support", "words"), _FEATURES)
def test_every_feature_has_its_verdict_on_every_kind(
    rule: Callable[[CacheFacts], Verdict],
    layers: list[LayerCacheFacts],
    support: Support,
    words: str,
) -> None:
    """A rule's answer is its own, in any order of layers, and the reason names what decides."""
    for facts in (_facts(*layers), _facts(*reversed(layers))):
        verdict = rule(facts)

        assert verdict.support is support
        assert words in verdict.reason
        assert (verdict.source, verdict.evidence) == (Source.RULE, UNSET)


@pytest.mark.parametrize(
    ("layers", "support", "extent", "words"),
    [
        (_STANDARD, Support.SUPPORTED, PrefixExtent.FULL, "block by block"),
        (_WINDOWS, Support.SUPPORTED, PrefixExtent.SNAPSHOT, "sliding window"),
        (_GDN, Support.SUPPORTED, PrefixExtent.SNAPSHOT, "copy"),
        (_HYBRID, Support.SUPPORTED, PrefixExtent.SNAPSHOT, "copy"),
        ([MAMBA, ROTATING], Support.SUPPORTED, PrefixExtent.SNAPSHOT, "copy"),
        ([MAMBA], Support.SUPPORTED, PrefixExtent.SNAPSHOT, "copy"),
        (_LISTS, Support.UNKNOWN, PrefixExtent.FULL, "KVCache"),
        ([_nested(MAMBA, KV)], Support.UNKNOWN, PrefixExtent.SNAPSHOT, "ArraysCache"),
        ([_nested(CHUNKED, KV)], Support.BLOCKED, PrefixExtent.NONE, "ChunkedKVCache"),
        (_CHUNKED, Support.BLOCKED, PrefixExtent.NONE, "ChunkedKVCache"),
        (_PRIVATE, Support.BLOCKED, PrefixExtent.NONE, "LayerCache"),
        ([], Support.UNKNOWN, PrefixExtent.FULL, "no cache"),
    ],
)
def test_a_prefix_is_kept_as_far_as_the_caches_allow(
    layers: list[LayerCacheFacts], support: Support, extent: PrefixExtent, words: str
) -> None:
    """State can only be copied; chunks and private caches keep nothing that could be reused."""
    for facts in (_facts(*layers), _facts(*reversed(layers))):
        verdict = prefix_cache(facts)

        assert (verdict.support, verdict.extent) == (support, extent)
        assert words in verdict.reason


@pytest.mark.parametrize(
    ("layers", "support", "words"),
    [
        (_STANDARD, Support.SUPPORTED, "row by row"),
        (_WINDOWS, Support.BLOCKED, "sliding window"),
        ([KV, SINKS], Support.BLOCKED, "attention sinks"),
        (_GDN, Support.UNKNOWN, "recurrent state"),
        ([GATED_DELTA, ROTATING], Support.BLOCKED, "sliding window"),
        (_HYBRID, Support.UNKNOWN, "recurrent state"),
        ([MAMBA], Support.UNKNOWN, "recurrent state"),
        (_CHUNKED, Support.BLOCKED, "ChunkedKVCache"),
        (_PRIVATE, Support.BLOCKED, "LayerCache"),
        (_LISTS, Support.UNKNOWN, "several caches"),
        ([_nested(MAMBA, KV)], Support.UNKNOWN, "several caches"),
        ([_nested(ROTATING, KV)], Support.BLOCKED, "sliding window"),
        ([], Support.UNKNOWN, "no cache"),
    ],
)
def test_drafts_of_a_batch_need_rows_that_are_rolled_back_one_by_one(
    layers: list[LayerCacheFacts], support: Support, words: str
) -> None:
    """A batch cannot verify drafts without rolling back single rows; with state, a probe decides."""
    verdict = batched_specdec(_facts(*layers))

    assert verdict.support is support
    assert words in verdict.reason


# --- what the docs say --------------------------------------------------------------------------

_PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "capabilities.md"
_OF_KIND = {
    KvCacheKind.STANDARD: _STANDARD,
    KvCacheKind.ROTATING: _WINDOWS,
    KvCacheKind.HYBRID_GDN: _GDN,
    KvCacheKind.HYBRID: _HYBRID,
    KvCacheKind.RECURRENT: [MAMBA],
    KvCacheKind.CHUNKED: _CHUNKED,
    KvCacheKind.COMPRESSED: _PRIVATE,
}


@pytest.mark.parametrize("kind", _OF_KIND)
def test_the_page_s_table_is_what_the_rules_say(kind: KvCacheKind) -> None:
    """Each kind's row names the verdicts on it, and the extent of a prefix that is kept."""
    lines = _PAGE.read_text("utf-8").splitlines()
    (row,) = (line for line in lines if line.startswith(f"| `{kind}` |"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    facts = _facts(*_OF_KIND[kind])
    prefix = prefix_cache(facts)
    is_kept = prefix.support is Support.SUPPORTED

    assert facts.kind is kind
    assert cells == [
        continuous_batching(facts).support,
        batched_specdec(facts).support,
        speculation(facts).support,
        f"{prefix.support} ({prefix.extent})" if is_kept else prefix.support,
        kv_quantization(facts).support,
        chunked_prefill(facts).support,
    ]
