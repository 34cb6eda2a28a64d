"""Cache facts: the kind that live objects make, and what they can do."""

from __future__ import annotations

import pytest

from machd.capabilities.facts import CacheFacts, KvCacheKind, LayerCacheFacts

KV = LayerCacheFacts("KVCache", owner="Attention")
ROTATING = LayerCacheFacts("RotatingKVCache", owner="Attention", window_tokens=128)
GATED_DELTA = LayerCacheFacts("ArraysCache", owner="Qwen3NextGatedDeltaNet", trimmable=False)
MAMBA = LayerCacheFacts("ArraysCache", owner="MambaMixer", trimmable=False)
NOBODYS = LayerCacheFacts("ArraysCache", trimmable=False)
CHUNKED = LayerCacheFacts("ChunkedKVCache", owner="Attention", mergeable=False)
PRIVATE = LayerCacheFacts("LayerCache", owner="Attention", mergeable=False)
NESTED = LayerCacheFacts("CacheList", trimmable=False, nested=(MAMBA, KV))


def _facts(*layers: LayerCacheFacts) -> CacheFacts:
    return CacheFacts(layers, bytes_per_token=1, bytes_per_sequence=0)


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ([KV, KV], KvCacheKind.STANDARD),
        ([ROTATING, ROTATING], KvCacheKind.ROTATING),
        ([KV, ROTATING], KvCacheKind.ROTATING),
        ([GATED_DELTA, KV], KvCacheKind.HYBRID_GDN),
        ([GATED_DELTA, ROTATING], KvCacheKind.HYBRID_GDN),
        ([MAMBA, KV], KvCacheKind.HYBRID),
        ([NOBODYS, KV], KvCacheKind.HYBRID),
        ([GATED_DELTA, MAMBA, KV], KvCacheKind.HYBRID),
        ([MAMBA, ROTATING], KvCacheKind.HYBRID),
        ([MAMBA, MAMBA], KvCacheKind.RECURRENT),
        ([GATED_DELTA], KvCacheKind.RECURRENT),
        ([CHUNKED, KV], KvCacheKind.CHUNKED),
        ([CHUNKED, MAMBA, KV], KvCacheKind.CHUNKED),
        ([PRIVATE, KV], KvCacheKind.COMPRESSED),
        ([PRIVATE, CHUNKED, MAMBA], KvCacheKind.COMPRESSED),
        ([NESTED, NESTED], KvCacheKind.NESTED),
        ([NESTED, PRIVATE, KV], KvCacheKind.NESTED),
    ],
)
def test_the_most_restrictive_class_decides_the_kind(
    layers: list[LayerCacheFacts], kind: KvCacheKind
) -> None:
    """A kind follows from the classes present and from the owners of state, in any order."""
    assert _facts(*layers).kind is kind
    assert _facts(*reversed(layers)).kind is kind


def test_every_kind_of_the_contract_exists() -> None:
    """The eight spellings are those of ``/v1/capabilities``."""
    assert {kind.value for kind in KvCacheKind} == {
        "standard",
        "rotating",
        "hybrid_gdn",
        "hybrid",
        "recurrent",
        "chunked",
        "compressed",
        "nested",
    }


def test_classes_are_counted_by_name() -> None:
    """``layers`` of a capability row counts cache objects, sorted by class name."""
    counts = _facts(ROTATING, KV, KV, GATED_DELTA).class_counts
    assert list(counts.items()) == [("ArraysCache", 1), ("KVCache", 2), ("RotatingKVCache", 1)]


def test_classes_inside_lists_are_named_once_each() -> None:
    """The kinds inside cache lists are told, sorted, without the list or what stands beside it."""
    other = LayerCacheFacts("CacheList", nested=(KV, CHUNKED))
    assert _facts(NESTED, other, ROTATING).nested_classes == (
        "ArraysCache",
        "ChunkedKVCache",
        "KVCache",
    )
    assert _facts(KV, ROTATING).nested_classes == ()


def test_one_cache_that_cannot_be_trimmed_spoils_all() -> None:
    """A model can be cut back only where each of its caches can."""
    assert _facts(KV, ROTATING).trimmable
    assert not _facts(KV, GATED_DELTA).trimmable
    assert not _facts(KV, NESTED).trimmable


def test_what_windows_keep_is_told_once_each() -> None:
    """Sizes and sink tokens of windows are sorted and without repeats, lists opened."""
    sinks = LayerCacheFacts("RotatingKVCache", keep=4, window_tokens=64)
    facts = _facts(KV, ROTATING, ROTATING, LayerCacheFacts("CacheList", nested=(sinks, MAMBA)))

    assert facts.window_tokens == (64, 128)
    assert facts.keep_tokens == (0, 4)
    assert _facts(KV, MAMBA).window_tokens == _facts(KV, MAMBA).keep_tokens == ()


def test_every_cache_is_seen_however_deep() -> None:
    """Lists count among all caches and not among the innermost ones."""
    deep = LayerCacheFacts("CacheList", nested=(NESTED, PRIVATE))
    facts = _facts(deep, KV)

    assert facts.every == (deep, NESTED, MAMBA, KV, PRIVATE, KV)
    assert facts.innermost == (MAMBA, KV, PRIVATE, KV)
    assert facts.private_classes == ("LayerCache",)


def test_a_window_cannot_be_cut_at_any_length() -> None:
    """A rotating cache says that it can be trimmed while it is empty; once full it cannot."""
    assert _facts(KV).can_be_cut
    assert _facts(KV, ROTATING).trimmable
    assert not _facts(KV, ROTATING).can_be_cut
    assert not _facts(KV, MAMBA).can_be_cut


def test_one_cache_that_cannot_be_merged_spoils_all() -> None:
    """A model's caches can be merged only where each of them can."""
    assert _facts(KV, ROTATING).mergeable
    assert not _facts(KV, CHUNKED).mergeable
