"""Configuration, limits and counts of the prefix cache, and sizes of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

_MIN_GAIN_TOKENS = 16

_MIN_SHARED_TOKENS = 256
"""Shortest shared prefix in tokens: shorter ones save too few bytes to pay for reading two arrays."""

MIN_BLOCK_BYTES = 4096
"""Least size that a block counts as, for its bookkeeping: otherwise a limit in bytes would not bound
blocks without positions and state."""

BYTES_PER_FILE = 6 * 1024
"""Size of a disk tier's file without keys, values and state: names, shapes, tokens."""


@dataclass(frozen=True, slots=True)
class PrefixLimits:
    """Limits of the prefix cache.

    Attributes:
        max_bytes: Memory of blocks, each counted once.
        max_entries: Texts in memory (leaf blocks); None for any number.
        left_bytes: Memory that blocks leave free on the machine.
        disk_bytes: Size of the disk tier's files, estimated from memory sizes; None without one.
    """

    max_bytes: int
    max_entries: int | None = None
    left_bytes: int = 0
    disk_bytes: int | None = None

    def memory_bytes(self, held_bytes: int, available_bytes: int | None) -> int:
        """Return the memory limit of blocks for the machine's free memory.

        Args:
            held_bytes: Memory of blocks now.
            available_bytes: Free memory of the machine; None where unknown.
        """
        if available_bytes is None:
            return self.max_bytes
        return max(0, min(self.max_bytes, held_bytes + available_bytes - self.left_bytes))


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """Expected size of blocks.

    Attributes:
        bytes_per_token: Keys and values of a position.
        bytes_per_state: Snapshot of state at a block's end.
        min_block_bytes: Least size that a block counts as, in memory and on disk.
        bytes_per_file: Further size of a block in the disk tier.
    """

    bytes_per_token: int
    bytes_per_state: int = 0
    min_block_bytes: int = MIN_BLOCK_BYTES
    bytes_per_file: int = BYTES_PER_FILE

    @property
    def is_stateful(self) -> bool:
        """True if a row can begin only at a snapshot of state."""
        return self.bytes_per_state > 0

    def of(self, tokens: int, *, has_state: bool) -> int:
        """Return the expected counted size of a block, in bytes."""
        state_bytes = self.bytes_per_state if has_state else 0
        return self.counted(tokens * self.bytes_per_token + state_bytes)

    def counted(self, nbytes: int) -> int:
        """Return the counted size of a block of ``nbytes``."""
        return max(nbytes, self.min_block_bytes)


class PrefixReading(Struct, frozen=True):
    """Counts of the prefix cache since the start, and of its blocks now.

    Attributes:
        queries: Prompts looked up.
        hits: Full hits: all but the last token was found, which is always computed.
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
        saved_bytes: Their size in memory.
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


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """Configuration of a prefix cache.

    Attributes:
        model_key: Key of the model and of all else on which the keys and values of tokens depend.
        block_tokens: Most tokens of a block.
        costs: Sizes of blocks.
        min_gain_tokens: Least tokens that waiting for a leader, or a snapshot at a branch point, has to save.
        min_shared_tokens: Tokens of the shortest prefix that rows share.
    """

    model_key: bytes
    block_tokens: int
    costs: BlockCosts
    min_gain_tokens: int = _MIN_GAIN_TOKENS
    min_shared_tokens: int = _MIN_SHARED_TOKENS
