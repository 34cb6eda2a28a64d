"""Counts of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixReading:
    """Counts of the prefix cache since the start, and of its blocks now.

    Attributes:
        queries: Prompts looked up.
        hits: Prompts found whole but for the last token, which is always computed.
        prefix_hits: Prompts of which only a shorter prefix was found.
        misses: Prompts without any reused token.
        entries: Texts in memory: leaf blocks.
        blocks: Blocks in memory.
        shared_blocks: Blocks on the path of more than one entry.
        pinned_blocks: Blocks on the path of a running sequence.
        bytes: Size of blocks in memory, each counted once, and as at least 4096.
        pinned_bytes: Size of pinned blocks.
        bytes_saved: Further memory needed if entries did not share blocks.
        limit_bytes: Memory limit; None where only the number of entries is limited.
        evictions: Blocks evicted.
        saved_blocks: Blocks in the disk tier.
        saved_bytes: Memory that those would take.
    """

    queries: int = 0
    hits: int = 0
    prefix_hits: int = 0
    misses: int = 0
    entries: int = 0
    blocks: int = 0
    shared_blocks: int = 0
    pinned_blocks: int = 0
    bytes: int = 0
    pinned_bytes: int = 0
    bytes_saved: int = 0
    limit_bytes: int | None = None
    evictions: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
