"""Diagnosis of a lookup in the prefix cache: why a row begins with so much of its prompt, and not with more."""

from __future__ import annotations

from machd.engine.protocol.media import FIRST_MEDIA_KEY
from machd.scheduler.block_tree import Block, Walk
from machd.scheduler.common_prefixes import PrefixRow
from machd.scheduler.events import CacheDiagnosis, CacheReason
from machd.scheduler.seen_prefixes import SeenPrefixes


def diagnose(
    row: PrefixRow, walk: Walk, usable: Block, seen: SeenPrefixes, *, min_gain_tokens: int
) -> CacheDiagnosis:
    """Tell why a row begins with ``row.found_tokens``.

    Three parts may be missing: what this kind of cache cannot begin behind, what is not in memory, and what lies behind the
    longest kept prefix. The longest part names the reason.

    Args:
        row: A row that begins now.
        walk: Longest kept prefix of its prompt.
        usable: Last kept block behind which this kind of cache can begin.
        seen: Prefixes computed before.
        min_gain_tokens: Least tokens that count as missing before the end of a kept prefix that is not the whole prompt.
    """
    found_tokens, parted_at_tokens = row.found_tokens, walk.tokens
    usable_tokens = min(usable.stop, parted_at_tokens)
    if row.sequence.asks_prompt_logprobs:
        reason = CacheReason.PROMPT_LOGPROBS
        return CacheDiagnosis(0, 0, reason, reason)
    missing = {
        CacheReason.KIND_CANNOT: parted_at_tokens - usable_tokens,
        CacheReason.EVICTED: usable_tokens - found_tokens,
    }
    kept_reason = max(missing, key=missing.__getitem__)
    behind_tokens = len(row.beginning) - parted_at_tokens

    def largest(reason: CacheReason) -> CacheReason:
        match reason:
            case CacheReason.WHOLE:
                least_tokens = 1
            case CacheReason.CONTINUED:  # nothing behind it could be reused
                least_tokens = min_gain_tokens
            case _:
                least_tokens = max(min_gain_tokens, behind_tokens)
        return kept_reason if missing[kept_reason] >= least_tokens else reason

    client_reason = _parting(row, walk)
    reason = client_reason
    if behind_tokens:
        found = seen.find(row.seen, row.seen.longer_than(parted_at_tokens, row.beginning))
        if row.kept_tokens > parted_at_tokens:
            found = CacheReason.EVICTED  # while it waited, or its file was damaged
        reason = found or client_reason
        client_reason = client_reason if reason is CacheReason.OTHER_NAMESPACE else reason
    return CacheDiagnosis(found_tokens, parted_at_tokens, largest(reason), largest(client_reason))


def _parting(row: PrefixRow, walk: Walk) -> CacheReason:
    """Compare what a prompt and kept texts have behind their longest common prefix."""
    block, at, text = walk.block, walk.tokens, row.beginning
    if at == len(text):
        return CacheReason.WHOLE
    if not at:
        return CacheReason.FIRST_SEEN
    kept = block.token_ids[at - block.start :][:1] or tuple(block.children)
    if not kept:
        return CacheReason.CONTINUED
    is_image = text[at] >= FIRST_MEDIA_KEY and max(kept) >= FIRST_MEDIA_KEY
    return CacheReason.IMAGE_CHANGED if is_image else CacheReason.DIVERGED
