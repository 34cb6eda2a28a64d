"""Counts of blocks in memory, kept incrementally because they are read while rows run.

A block that is appended to a leaf, or a row that goes on along its text, changes no count above; only a
new branch updates the path above it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from machd.scheduler.block_tree import Block


class BlockCounts:
    """Counts of the blocks in memory.

    Attributes:
        bytes: Size of the blocks.
        entries: Leaf blocks in memory: texts.
        shared_blocks: Blocks on the path of more than one entry.
        bytes_saved: Further memory needed if entries did not share blocks.
        pinned_blocks: Blocks on the path of a pinned one.
        pinned_bytes: Size of the pinned blocks.
    """

    def __init__(self) -> None:
        """Start without blocks."""
        self.bytes = self.entries = self.shared_blocks = self.bytes_saved = 0
        self.pinned_blocks = self.pinned_bytes = 0

    def enter(self, block: Block) -> None:
        """Add a leaf block."""
        assert not block.memory_children, "parents come first"
        block.entries = 1
        self.bytes += block.nbytes
        if block.holds:
            self._hold(block, 1)
        parent = block.before
        parent.memory_children += 1
        if parent.is_root or parent.memory_children > 1:
            self._branch(parent, 1)

    def leave(self, block: Block) -> None:
        """Remove a leaf block."""
        assert not block.memory_children, "children go first"
        block.entries = 0
        self.bytes -= block.nbytes
        if block.holds:
            self._hold(block, -1)
        parent = block.before
        parent.memory_children -= 1
        if parent.is_root or parent.memory_children:
            self._branch(parent, -1)

    def resize(self, block: Block, more_bytes: int) -> None:
        """Add ``more_bytes`` to the size of a block in memory."""
        self.bytes += more_bytes
        self.bytes_saved += (block.entries - 1) * more_bytes
        if block.holds:
            self.pinned_bytes += more_bytes

    def split(self, head: Block, tail: Block) -> None:
        """Add ``head``, which was cut from the beginning of ``tail``; their size together is unchanged."""
        head.entries, head.memory_children = tail.entries, 1
        self.shared_blocks += head.entries > 1
        if tail.holds:
            head.holds = 1
            self.pinned_blocks += 1

    def pin(self, block: Block, more: int = 1) -> None:
        """Pin a block, and with it the path to it, for a row; ``more`` is -1 to unpin it."""
        block.pins += more
        assert block.pins >= 0, "pinned before"
        one: Block | None = block
        while one is not None:
            was_held = one.holds > 0
            one.holds += more
            if was_held and one.holds:
                return
            if one.is_in_memory:
                self._hold(one, more)
            one = one.parent

    def check(self, blocks: Sequence[Block]) -> None:
        """Assert that the counts match ``blocks``, parents first."""
        inside = [block for block in blocks if block.is_in_memory]
        children = Counter(id(one.before) for one in inside)
        texts: Counter[int] = Counter()
        for block in reversed(inside):
            assert block.entries == max(texts[id(block)], 1), "entries of a block are counted"
            texts[id(block.before)] += block.entries
        holds = Counter(id(one.before) for one in blocks if one.holds)
        for block in blocks:
            assert block.memory_children == children[id(block)], "children in memory are counted"
            # Rows may still pin a lost block until their next lookup.
            assert block.holds >= block.pins + holds[id(block)], "what rows hold is counted"
        shared = [one for one in inside if one.entries > 1]
        pinned = [one for one in inside if one.holds]
        assert self.bytes == sum(one.nbytes for one in inside), "bytes of blocks add up"
        assert self.entries == sum(not one.memory_children for one in inside), "entries add up"
        assert self.shared_blocks == len(shared), "shared blocks are counted"
        saved_bytes = sum((one.entries - 1) * one.nbytes for one in shared)
        assert self.bytes_saved == saved_bytes, "what is saved by sharing adds up"
        assert self.pinned_blocks == len(pinned), "pinned blocks are counted"
        assert self.pinned_bytes == sum(one.nbytes for one in pinned), "pinned bytes add up"

    def _hold(self, block: Block, more: int) -> None:
        self.pinned_blocks += more
        self.pinned_bytes += more * block.nbytes

    def _branch(self, block: Block, more: int) -> None:
        """Add ``more`` entries to a block and the path to it."""
        self.entries += more
        one = block
        while not one.is_root:
            was_shared = one.entries > 1
            one.entries += more
            self.shared_blocks += (one.entries > 1) - was_shared
            self.bytes_saved += more * one.nbytes
            one = one.before
