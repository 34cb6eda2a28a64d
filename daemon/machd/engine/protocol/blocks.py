"""What a step does with blocks: keys and values of a stretch of tokens, kept beside the rows.

A block holds what the positions of its tokens left in the caches, given that certain tokens came
before. The scheduler knows which tokens those are and decides what is kept, shared and dropped; the
engine knows how it lies in memory. Between them a block is a number.

A step makes the changes of its plan in their order, before all else. Then who is gone is released,
and rows are opened from blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreBlock:
    """Copy positions of a row into a new block.

    What a row keeps for its positions one by one (standard caches) can be copied for any of them
    that are computed. All else (windows, recurrent state) only exists for where the row stands.

    Attributes:
        block_id: A number that no block has.
        start: First position.
        stop: Position after the last one; what is copied is computed.
        has_state: Whether the row stands at ``stop`` and all else is kept, too.
    """

    block_id: int
    slot_index: int
    start: int
    stop: int
    has_state: bool = False


@dataclass(frozen=True, slots=True)
class SplitBlock:
    """Cut a block in two, because another text goes on differently in its middle.

    Attributes:
        block_id: Keeps the positions from ``at`` on, and its state.
        head_id: A number that no block has; gets the positions before, and no state.
        at: Positions of the head, at least one and fewer than there are.
    """

    block_id: int
    head_id: int
    at: int


@dataclass(frozen=True, slots=True)
class DropBlocks:
    """Give back the memory of blocks; numbers that no block has are no fault."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A block as the disk tier knows it.

    Attributes:
        digest: Of everything that decides its content: the model, how caches are kept, whose text
            it is, and all tokens up to its end. The name it is saved by.
        parent: The same up to where it starts; at position 0 that of no tokens at all.
        start: First position.
        token_ids: Its tokens; what a digest promises is compared with them.
        has_state: Whether it has what only exists at its end.
        nbytes: What it takes in memory.
        used_unix_s: When it was last of use, as far as is known.
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
    """Write a block to the disk tier, behind the steps' back. That it cannot is no fault."""

    block_id: int
    saved: SavedBlock


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """Read a block of the disk tier into memory."""

    block_id: int
    saved: SavedBlock


@dataclass(frozen=True, slots=True)
class ForgetSaved:
    """Delete blocks of the disk tier; those that are not there are no fault."""

    digests: tuple[bytes, ...]


BlockChange = StoreBlock | SplitBlock | DropBlocks | SaveBlock | LoadBlock | ForgetSaved


@dataclass(frozen=True, slots=True)
class HeldBlock:
    """A block that is in memory since this step, or whose size has changed.

    Attributes:
        nbytes: What it takes there.
        has_state: Whether it has what only exists at its end.
    """

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
    """The beginning of a prompt that is not computed, because blocks hold it.

    Attributes:
        token_ids: Its tokens, at least one and not the prompt's last.
        block_ids: Blocks that follow one another from position 0 and hold at least as many
            positions. With state, the last of them ends where the tokens do.
    """

    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
