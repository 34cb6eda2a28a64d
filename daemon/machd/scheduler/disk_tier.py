"""Index of the blocks in the disk tier. The engine owns the files; the index has the blocks that it was asked to keep.

A block is saved only behind its parents, since a lookup starts at the root. A block that the engine
reports as not saved leaves the index, and is saved again with its next use.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator

from machd.engine.protocol.blocks import BlockChange, ForgetSaved, LoadBlock, SaveBlock, SavedBlock
from machd.scheduler.block_tree import Block, BlockTree
from machd.scheduler.eviction import LeafHeap
from machd.scheduler.prefix_limits import BlockCosts

_MAX_LOADS = 32
_MAX_SAVES = 32
"""Most blocks that a step reads and writes: each delays the step by about a millisecond."""


class DiskTier:
    """The tree's blocks on disk.

    Attributes:
        bytes: Their size in memory.
        max_loads: Most blocks that a step reads.
        max_saves: Most blocks that a step writes, apart from halves of a split one.
    """

    def __init__(
        self,
        tree: BlockTree,
        changes: list[BlockChange],
        costs: BlockCosts,
        limit_bytes: int | None,
    ) -> None:
        """Start without blocks.

        Args:
            tree: All blocks.
            changes: Block changes of the next step, to append to.
            costs: Sizes of blocks and files.
            limit_bytes: Limit of :attr:`file_bytes`; None without a disk tier.
        """
        self.bytes = 0
        self.max_loads, self.max_saves = _MAX_LOADS, _MAX_SAVES
        self._tree = tree
        self._changes = changes
        self._costs = costs
        self._limit_bytes = limit_bytes
        self._by_digest: dict[bytes, Block] = {}
        self._waiting: deque[Block] = deque()
        self._queued: set[Block] = set()
        self._leaves = LeafHeap(_is_leaf, deepest_first=True)

    @property
    def count(self) -> int:
        """Number of saved blocks."""
        return len(self._by_digest)

    @property
    def file_bytes(self) -> int:
        """Estimated size of the files, which is limited."""
        return self.bytes + self.count * self._costs.bytes_per_file

    def set_limit(self, limit_bytes: int | None) -> None:
        """Change the limit, and evict down to it."""
        self._limit_bytes = limit_bytes
        self.trim()

    def trim(self) -> None:
        """Evict blocks until the files fit the limit."""
        if self._limit_bytes is not None:
            self._shrink(self._limit_bytes)

    def find(self, saved: Iterable[SavedBlock]) -> Iterator[Block]:
        """Add blocks saved by an earlier daemon, parents first; orphans are deleted."""
        for one in saved:
            parent = self._tree.root_of(one.parent) if not one.start else self.known_as(one.parent)
            is_fit = (
                parent is not None
                and parent.stop == one.start
                and one.token_ids
                and one.token_ids[0] not in parent.children
                and one.digest not in self._by_digest
            )
            if parent is None or not is_fit:
                self._changes.append(ForgetSaved((one.digest,)))
                continue
            block = self._tree.add(parent, one.token_ids, digest=one.digest)
            block.nbytes, block.has_state = self._costs.counted(one.nbytes), one.has_state
            self._count_in(block)
            yield block
        self.trim()

    def known_as(self, digest: bytes) -> Block | None:
        """Return the saved block with that digest, if any."""
        return self._by_digest.get(digest)

    def save(self, block: Block) -> None:
        """Queue a block to be saved, behind its unsaved parents in memory.

        :meth:`write_waiting` writes them.
        """
        if self._limit_bytes is None:
            return
        missing: list[Block] = []
        while self._is_unsaved(block):
            missing.append(block)
            block = block.before
        if block.is_root or block.is_saved or block in self._queued:
            self._queue(reversed(missing))

    def save_path(self, blocks: Iterable[Block]) -> None:
        """Queue the unsaved blocks of a path from the root."""
        if self._limit_bytes is not None:
            self._queue(one for one in blocks if self._is_unsaved(one))

    def write_waiting(self) -> None:
        """Write queued blocks, parents first, as many as one step may."""
        room = self.max_saves - sum(isinstance(one, SaveBlock) for one in self._changes)
        while self._waiting and room > 0:
            block = self._waiting.popleft()
            self._queued.discard(block)
            if self._can_save(block) and self._make_room(block.nbytes, keep=(block.before,)):
                self._write(block)
                room -= 1
                self._queue(one for one in block.children.values() if self._is_unsaved(one))

    def _is_unsaved(self, block: Block) -> bool:
        return block.is_held and not block.is_saved and block not in self._queued

    def _queue(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._waiting.append(block)
            self._queued.add(block)

    @property
    def has_load_room(self) -> bool:
        """True if the next step may read one more block."""
        return sum(isinstance(one, LoadBlock) for one in self._changes) < self.max_loads

    def load(self, block: Block) -> None:
        """Have the next step read a block into memory."""
        self._changes.append(LoadBlock(block.block_id, _saved(block)))

    def forget(self, block: Block) -> None:
        """Delete a block from disk, if it is saved."""
        if not block.is_saved:
            return
        self._changes.append(ForgetSaved((block.digest,)))
        block.is_saved = False
        self.bytes -= block.nbytes
        del self._by_digest[block.digest]
        parent = block.before
        parent.saved_children -= 1
        self._leaves.offer(parent)

    def forget_all(self) -> set[Block]:
        """Delete all blocks from disk, and return them."""
        blocks = set(self._by_digest.values())
        if blocks:
            self._changes.append(ForgetSaved(tuple(self._by_digest)))
        for block in blocks:
            block.is_saved = False
            block.before.saved_children = 0
        self.bytes = 0
        self._by_digest.clear()
        self._leaves = LeafHeap(_is_leaf, deepest_first=True)
        return blocks

    def resize(self, block: Block, more_bytes: int) -> None:
        """Add ``more_bytes`` to the size of a block, if it is saved."""
        self.bytes += more_bytes if block.is_saved else 0

    def write_halves(self, head: Block, tail: Block) -> None:
        """Save both halves of a saved block that is about to be split.

        Two files take one header more than one, so the block of lowest priority may be evicted.
        """
        self._write(head)
        self._write(tail)
        self.trim()

    def check(self, blocks: Collection[Block]) -> None:
        """Assert that the index matches the blocks of the tree."""
        saved = {block.digest: block for block in blocks if block.is_saved}
        assert saved == self._by_digest, "saved blocks are counted"
        assert self.bytes == sum(one.nbytes for one in saved.values()), "saved bytes add up"
        offered = {id(block) for block in self._leaves}
        children = Counter(id(one.before) for one in saved.values())
        for block in blocks:
            assert block.saved_children == children[id(block)], "saved children are counted"
            assert not _is_leaf(block) or id(block) in offered, "evictable blocks are in the heap"

    def _can_save(self, block: Block) -> bool:
        if self._limit_bytes is None or block.is_saved or not block.is_held:
            return False
        return block.before.is_root or block.before.is_saved

    def _write(self, block: Block) -> None:
        self._count_in(block)
        self._changes.append(SaveBlock(block.block_id, _saved(block)))

    def _count_in(self, block: Block) -> None:
        block.is_saved = True
        self.bytes += block.nbytes
        self._by_digest[block.digest] = block
        block.before.saved_children += 1
        self._leaves.offer(block)

    def _make_room(self, nbytes: int, keep: Collection[Block] = ()) -> bool:
        """Evict blocks for a new one; returns whether it fits.

        Args:
            nbytes: Its size in memory.
            keep: Blocks to spare, and with them their parents.
        """
        if self._limit_bytes is None:
            return True
        left_bytes = self._limit_bytes - nbytes - self._costs.bytes_per_file
        if left_bytes < 0:
            return False
        self._shrink(left_bytes, keep)
        return self.file_bytes <= left_bytes

    def _shrink(self, goal_bytes: int, keep: Collection[Block] = ()) -> None:
        """Evict the lowest-priority leaf blocks until the files fit ``goal_bytes``."""
        while self.file_bytes > goal_bytes:
            block = self._leaves.take(keep)
            if block is None:
                return
            self.forget(block)
            if not block.is_known:
                self._tree.remove(block)


def _is_leaf(block: Block) -> bool:
    return block.is_saved and not block.saved_children


def _saved(block: Block) -> SavedBlock:
    return SavedBlock(
        digest=block.digest,
        parent=block.before.digest,
        start=block.start,
        token_ids=block.token_ids,
        has_state=block.has_state,
        nbytes=block.nbytes,
    )
