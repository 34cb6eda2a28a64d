"""From facts to verdicts: one predicate for each feature, read by every surface that speaks of it.

A rule may say "unknown". That a cache can be merged proves nothing about the model that fills it:
of the architectures that mlx-lm merges without complaint, some answer wrongly in a batch. A rule
says what the caches allow; what the daemon serves is said by its features.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts, KvCacheKind
from machd.capabilities.verdict import Support, Verdict


class PrefixExtent(StrEnum):
    """Share of a prompt's cache that can serve another prompt."""

    FULL = "full"
    """Any beginning of it: the cache can be cut."""

    SNAPSHOT = "snapshot"
    """Beginnings that were copied when the prompt reached them."""

    NONE = "none"


class PrefixVerdict(Verdict, frozen=True, kw_only=True):
    """The verdict on reusing a prompt's caches for another prompt.

    Attributes:
        extent: How much of a prompt: any beginning, those that were copied on the way, or nothing.
            Where the verdict is unknown, it is what the caches allow.
    """

    extent: PrefixExtent


_NO_CACHE = "the model keeps no cache that could be judged"


def chunked_prefill(facts: CacheFacts) -> Verdict:
    """Judge a prompt computed in chunks: it must get what it would get in one piece."""
    kinds = _kinds(facts)
    if not kinds or kinds & {KvCacheKind.CHUNKED, KvCacheKind.COMPRESSED, KvCacheKind.NESTED}:
        return _unknown_kind(facts, "whether they carry a prompt over from chunk to chunk")
    if facts.kind in {KvCacheKind.HYBRID, KvCacheKind.RECURRENT}:
        return Verdict(
            Support.UNKNOWN,
            "layers keep recurrent state, and whether it is carried over from chunk to chunk "
            "depends on the model's code; measure it: machd check --measure",
        )
    return Verdict(Support.SUPPORTED, "every cache takes a prompt in chunks and keeps its position")


def expert_streaming(results: Sequence[ProbeResult]) -> Verdict:
    """Judge whether experts can be read from disk when a step needs them.

    Facts of caches say nothing about experts, so the probe ``expert_streaming`` tells whether there are any.
    """
    mine = [result for result in results if result.probe == "expert_streaming"]
    if any(result.outcome is Outcome.UNSUPPORTED for result in mine):
        return Verdict(Support.BLOCKED, "no layer has experts")
    return Verdict(Support.UNKNOWN, "experts on disk have not been measured for this code")


def batched_adapters(results: Sequence[ProbeResult]) -> Verdict:
    """Judge whether rows with different adapters, and with none, can share a batch.

    Facts of caches say nothing about linear layers, so the probe ``adapters`` tells whether adapters can change any.
    """
    mine = [result for result in results if result.probe == "adapters"]
    unsupported = next((one for one in mine if one.outcome is Outcome.UNSUPPORTED), None)
    if unsupported is not None:
        return Verdict(Support.BLOCKED, unsupported.detail)
    return Verdict(
        Support.UNKNOWN,
        "adapters have not been measured for this code; rows with adapters are computed one at a time until they have been",
    )


def speculation(facts: CacheFacts) -> Verdict:
    """Judge if draft tokens can be verified in one pass, and the rejected ones rolled back.

    Where it is blocked, ``can_roll_back`` of the engine's lanes is false, and nowhere else.
    """
    kinds = _kinds(facts)
    if KvCacheKind.COMPRESSED in kinds:
        return Verdict(
            Support.BLOCKED,
            f"{_own_class(facts)}, and nothing is known about rolling rejected drafts back in it; decode "
            "without speculation",
        )
    if KvCacheKind.CHUNKED in kinds:
        return Verdict(
            Support.BLOCKED,
            "layers attend in chunks (ChunkedKVCache) and drop the ones before, and nothing is known "
            "about rolling rejected drafts back; decode without speculation",
        )
    if not kinds:
        return _unknown_kind(facts, "whether rejected drafts can be rolled back in them")
    if facts.can_be_cut:
        how = "cut back"
    elif KvCacheKind.RECURRENT in kinds:
        how = "put back from a copy made before them, and what was right is computed again"
    else:
        how = "cut back right behind the pass, windows too"
    return Verdict(
        Support.SUPPORTED, f"rejected drafts can be rolled back: every cache can be {how}"
    )


def prefix_cache(facts: CacheFacts) -> PrefixVerdict:
    """Judge caches of a prompt for another prompt that begins alike."""
    kinds = _kinds(facts)
    if KvCacheKind.COMPRESSED in kinds:
        return PrefixVerdict(
            Support.BLOCKED,
            f"{_own_class(facts)}, and nothing is "
            "known about keeping a part of it; every prompt is computed anew",
            extent=PrefixExtent.NONE,
        )
    if KvCacheKind.CHUNKED in kinds:
        return PrefixVerdict(
            Support.BLOCKED,
            "layers attend in chunks (ChunkedKVCache) and drop the ones before; every prompt is "
            "computed anew",
            extent=PrefixExtent.NONE,
        )
    is_copied = bool(kinds & {KvCacheKind.RECURRENT, KvCacheKind.ROTATING})
    extent = PrefixExtent.SNAPSHOT if is_copied else PrefixExtent.FULL
    if not kinds or KvCacheKind.NESTED in kinds:
        unknown = _unknown_kind(facts, "whether they can be kept for another prompt")
        return PrefixVerdict(unknown.support, unknown.reason, extent=extent)
    if KvCacheKind.RECURRENT in kinds:
        reason = "recurrent state cannot be cut back; it is kept where a copy of it was made"
    elif is_copied:
        reason = "a sliding window cannot be cut back; it is kept where a copy of it was made"
    else:
        reason = "every layer keeps a standard KV cache, which is kept block by block"
    return PrefixVerdict(Support.SUPPORTED, reason, extent=extent)


def kv_quantization(facts: CacheFacts) -> Verdict:
    """Judge keys and values in fewer bits: those of standard caches are supported."""
    kinds = _kinds(facts)
    if KvCacheKind.COMPRESSED in kinds:
        return _full_size(_own_class(facts))
    if KvCacheKind.CHUNKED in kinds:
        return _full_size("layers attend in chunks (ChunkedKVCache)")
    if not kinds:
        return _unknown_kind(facts, "whether there are keys and values in them")
    every = facts.innermost
    count = sum(one.kind is KvCacheKind.STANDARD for one in every)
    if not count and kinds <= {KvCacheKind.RECURRENT, KvCacheKind.NESTED}:
        return _full_size("the model keeps recurrent state and no keys and values")
    if not count:
        return _full_size("every layer keeps a sliding window (RotatingKVCache) or recurrent state")
    if count == len(every):
        kept = f"all {count} caches are standard ones (KVCache) and kept in fewer bits"
    else:
        kept = (
            f"{count} of {len(every)} caches are standard ones (KVCache) and kept in fewer bits, the "
            "others as they are"
        )
    if KvCacheKind.NESTED in kinds or facts.kind is KvCacheKind.HYBRID:
        question = "whether the model reads them so depends on its code"
        return Verdict(Support.UNKNOWN, f"{kept}; {question}; measure it: machd check --measure")
    return Verdict(Support.SUPPORTED, kept)


def _kinds(facts: CacheFacts) -> set[KvCacheKind]:
    """The kinds of all caches one by one, those inside lists too, which add ``nested``."""
    kinds = {one.kind for one in facts.innermost}
    return kinds | {KvCacheKind.NESTED} if facts.kind is KvCacheKind.NESTED else kinds


def _unknown_kind(facts: CacheFacts, question: str) -> Verdict:
    if not facts.layers:
        return Verdict(Support.UNKNOWN, f"{_NO_CACHE}; measure it: machd check --measure")
    names = ", ".join(sorted({one.class_name for one in facts.innermost or facts.layers}))
    return Verdict(
        Support.UNKNOWN,
        f"the model keeps caches of {names}, and {question} is not known from them; "
        "measure it: machd check --measure",
    )


def _own_class(facts: CacheFacts) -> str:
    names = ", ".join(facts.private_classes)
    return f"the model keeps a cache class of its own ({names})"


def _full_size(reason: str) -> Verdict:
    return Verdict(Support.BLOCKED, f"{reason}, which cannot be quantised; it is kept as it is")
