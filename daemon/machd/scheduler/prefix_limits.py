"""How much the prefix cache may keep."""

from __future__ import annotations

from dataclasses import dataclass

MIN_BLOCK_BYTES = 4096
"""A block counts as so much at least, for what the tree and the engine keep about it: or a limit in
bytes would not bound blocks that have no positions and no state."""

BYTES_PER_FILE = 6 * 1024
"""What a file of the disk tier has besides keys, values and state: names, shapes, tokens."""


@dataclass(frozen=True, slots=True)
class PrefixLimits:
    """What blocks may take.

    Attributes:
        max_bytes: In memory, each block counted once.
        max_entries: Texts that are kept: ends of chains of blocks; None for any number.
        left_bytes: What the machine is to have left. While it has less, blocks take less.
        disk_bytes: In the disk tier, by what they would take in memory and what a file has
            besides; None without one.
    """

    max_bytes: int
    max_entries: int | None = None
    left_bytes: int = 0
    disk_bytes: int | None = None

    def memory_bytes(self, held_bytes: int, available_bytes: int | None) -> int:
        """What blocks may take now.

        Args:
            held_bytes: What they take.
            available_bytes: What the machine could still give; None where nobody knows.
        """
        if available_bytes is None:
            return self.max_bytes
        return max(0, min(self.max_bytes, held_bytes + available_bytes - self.left_bytes))


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What a block takes, as far as it is known before it is there.

    Attributes:
        bytes_per_token: Of keys and values.
        bytes_per_state: Of what exists at its end alone.
        min_block_bytes: What it counts as at least, in memory and in the disk tier.
        bytes_per_file: What it takes there besides.
    """

    bytes_per_token: int
    bytes_per_state: int = 0
    min_block_bytes: int = MIN_BLOCK_BYTES
    bytes_per_file: int = BYTES_PER_FILE

    @property
    def is_stateful(self) -> bool:
        """Whether a row can only begin where state was kept."""
        return self.bytes_per_state > 0

    def of(self, tokens: int, *, has_state: bool) -> int:
        """What a block of so many tokens is expected to count as, in bytes."""
        state_bytes = self.bytes_per_state if has_state else 0
        return self.counted(tokens * self.bytes_per_token + state_bytes)

    def counted(self, nbytes: int) -> int:
        """What a block counts as that takes ``nbytes``."""
        return max(nbytes, self.min_block_bytes)
