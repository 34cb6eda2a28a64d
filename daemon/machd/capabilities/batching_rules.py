"""Two rules on rows that share a batch: plain decoding, and verifying drafts together."""

from __future__ import annotations

from types import MappingProxyType

from machd.capabilities.facts import CacheFacts, KvCacheKind
from machd.capabilities.verdict import Support, Verdict

_MEASURE = "requests are served one at a time until it has been measured"
_ALONE = "requests are served one at a time"
_ROWS_ALONE = "rows verify drafts alone"
_NO_CACHE = "the model keeps no cache that could be judged"

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
    """Judge rows of different length in one batch: each must get what it would get alone.

    Judged by the most restrictive cache anywhere, inside cache lists too.
    """
    obstacle = _batch_obstacle(facts)
    if obstacle:
        return Verdict(Support.BLOCKED, f"{obstacle}; {_ALONE}")
    kind = facts.kind
    if not facts.layers:
        return Verdict(Support.UNKNOWN, f"{_NO_CACHE}; {_MEASURE}")
    if kind is KvCacheKind.STANDARD:
        return Verdict(
            Support.SUPPORTED,
            "every layer keeps a standard KV cache, which a batch keeps row by row",
        )
    if kind is KvCacheKind.HYBRID_GDN and not facts.window_tokens:
        return Verdict(
            Support.SUPPORTED,
            "gated-delta-net state beside standard KV caches: both are kept row by row, and padding "
            "is masked out of the state",
        )
    # Gated-delta-net beside windows is as unknown as the windows are.
    reason = _UNKNOWN.get(kind, _UNKNOWN[KvCacheKind.ROTATING])
    return Verdict(Support.UNKNOWN, f"{reason}; {_MEASURE}")


def batched_specdec(facts: CacheFacts) -> Verdict:
    """Judge drafts in a batch: each row must roll back its own rejected tokens.

    The rows do the same whatever the proposer. Recurrent state is put back to before the pass, and what was
    right is computed again with the rest of each row masked out, as padding is.
    """
    obstacle = _batch_obstacle(facts)
    if obstacle:
        return Verdict(Support.BLOCKED, f"{obstacle}; {_ROWS_ALONE}")
    if not facts.layers:
        return Verdict(Support.UNKNOWN, f"{_NO_CACHE}; {_ROWS_ALONE}")
    if facts.window_tokens:
        return Verdict(
            Support.BLOCKED,
            "rows accept different numbers of drafts, and a sliding window cannot be cut back for one "
            f"row of a batch; {_ROWS_ALONE}",
        )
    if facts.has_positions_only and facts.kind is not KvCacheKind.NESTED:
        return Verdict(
            Support.SUPPORTED,
            "every layer keeps a standard KV cache, which is cut back row by row after verification",
        )
    what = (
        "layers keep several caches each"
        if facts.kind is KvCacheKind.NESTED
        else "layers keep recurrent state"
    )
    return Verdict(
        Support.UNKNOWN,
        f"{what}, and whether rows with different numbers of drafts stay apart in them depends on the "
        f"model's code; {_ROWS_ALONE}",
    )


def _batch_obstacle(facts: CacheFacts) -> str | None:
    """Return the reason that keeps rows out of a batch for certain; None where there is none."""
    every = facts.every
    if facts.private_classes:
        names = ", ".join(facts.private_classes)
        return (
            f"the model keeps a cache class of its own ({names}), and nothing is "
            "known about merging it into a batch"
        )
    if any(layer.kind is KvCacheKind.CHUNKED for layer in every):
        return "layers attend in chunks (ChunkedKVCache), which mlx-lm cannot merge"
    if any(layer.keep for layer in every):
        return (
            "a rotating cache keeps the first tokens for good (attention sinks), and merging it "
            "loses them"
        )
    unmergeable = sorted({layer.class_name for layer in every if not layer.mergeable})
    if unmergeable:
        return f"mlx-lm cannot merge caches of {', '.join(unmergeable)} into a batch"
    return None
