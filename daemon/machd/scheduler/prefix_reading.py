"""What the prefix cache has done and what it holds, at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixReading:
    """Counts since the start, and what there is now.

    Attributes:
        queries: Prompts that were looked up.
        hits: Those that were found whole, but for the last token, which is always computed.
        prefix_hits: Those of which a beginning was found.
        misses: The others.
        entries: Texts that are kept: ends of chains of blocks.
        blocks: Blocks in memory.
        shared_blocks: Those that more than one entry begins with.
        pinned_blocks: Those that running sequences hold.
        bytes: What the blocks take in memory, each counted once, and as 4096 at least.
        pinned_bytes: What the pinned ones take.
        bytes_saved: What would be taken besides if every entry had blocks of its own.
        limit_bytes: What they may take; None where only their number is limited.
        evictions: Blocks that made room for others.
        saved_blocks: Blocks in the disk tier.
        saved_bytes: What those would take in memory.
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
