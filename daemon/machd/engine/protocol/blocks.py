"""Blocks of the prefix cache, as the scheduler and the engine name them.

A block holds the keys and values of a stretch of tokens after certain others, and perhaps the state
at its end. The scheduler knows the tokens and decides which blocks are kept, shared and dropped; the
engine knows how they lie in memory. Between them a block is a number.

A step makes the changes of its plan in their order, before all else. Then it releases slots, and
opens rows from blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """Copy positions of a row into a new block.

    Keys and values of standard caches can be copied for any computed positions. The state (windows,
    recurrent state) exists only for the last computed one.

    Attributes:
        block_id: A number that no block has.
        has_state: Whether the state is copied, too; the row is then computed up to ``stop``.
    """

    block_id: int
    slot_index: int
    start: int
    stop: int
    has_state: bool = False


@dataclass(frozen=True, slots=True)
class SplitBlock:
    """Cut a block in two at a branch point, where another text goes on differently.

    Attributes:
        block_id: The block, which keeps the positions from ``at`` on, and its state.
        head_id: A number that no block has, for the positions before, without state.
        at: Positions of the head, at least one and fewer than there are.
    """

    block_id: int
    head_id: int
    at: int


@dataclass(frozen=True, slots=True)
class DropBlocks:
    """Drop blocks from memory; numbers that no block has are ignored."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A block as the disk tier knows it.

    Attributes:
        digest: The name that it is saved by: a digest of the model, the KV format, the namespace
            and all tokens up to its end.
        parent: The digest up to its start; at position 0 that of no tokens at all.
        token_ids: Its tokens, which are compared besides the digest.
        has_state: Whether it has the state at its end.
        nbytes: Bytes that it takes in memory.
        used_unix_s: The time at which it was last of use, as far as is known.
    """

    digest: bytes
    parent: bytes
    start: int
    token_ids: tuple[int, ...]
    has_state: bool
    nbytes: int
    used_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveBlock:
    """Write a block to the disk tier while steps go on; a failure is told by a later step."""

    block_id: int
    saved: SavedBlock


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """Read a block of the disk tier into memory."""

    block_id: int
    saved: SavedBlock


@dataclass(frozen=True, slots=True)
class ForgetSaved:
    """Delete blocks of the disk tier; digests that are not there are ignored."""

    digests: tuple[bytes, ...]


BlockChange = StoreBlock | SplitBlock | DropBlocks | SaveBlock | LoadBlock | ForgetSaved


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block that is in memory since this step, or has another size since."""

    block_id: int
    nbytes: int
    has_state: bool = False


@dataclass(frozen=True, slots=True)
class BlockOutcome:
    """The effect of a plan's changes.

    Attributes:
        held: Blocks that are in memory since, or have another size.
        lost: Numbers of the blocks that could not be made or read.
        unsaved: Digests of blocks that the disk tier was to keep and does not, each once.
        dropped_bytes: Memory that was given back.
    """

    held: tuple[HeldBlock, ...] = ()
    lost: tuple[int, ...] = ()
    unsaved: tuple[bytes, ...] = ()
    dropped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReusedPrefix:
    """The beginning of a prompt that is taken from blocks instead of computed.

    Attributes:
        token_ids: Its tokens, at least one and not the prompt's last.
        block_ids: Blocks that follow one another from position 0 and hold at least as many
            positions. With state, the last of them ends where the tokens do.
    """

    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
