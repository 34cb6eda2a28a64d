"""The books of the disk tier: which blocks it was asked to keep, and what they would take in memory.

A block is kept there only behind what comes before it, or nobody could find it again. The tier itself
is the engine's; all that is known here is what it was asked for, and what it says that it missed.
Such blocks are asked for again when they are of use the next time.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator

from machd.engine.protocol.blocks import BlockChange, ForgetSaved, LoadBlock, SaveBlock, SavedBlock
from machd.scheduler.block_tree import Block, BlockTree
from machd.scheduler.prefix_limits import BlockCosts

_MAX_LOADS = 32
_MAX_SAVES = 32
"""Blocks that a step reads and writes at the most. Each takes a millisecond or some, in which no
running row gets a token; those of a long text come with several steps."""

_MIN_SWEPT_ENTRIES = 64
"""Entries of the heap before those that no longer hold are looked for."""


class DiskTier:
    """The tree's blocks that outlive the daemon.

    Attributes:
        bytes: What they would take in memory.
        max_loads: Blocks that a step reads at the most.
        max_saves: Blocks that a step writes at the most, but for those that are cut.
    """

    def __init__(
        self,
        tree: BlockTree,
        changes: list[BlockChange],
        costs: BlockCosts,
        limit_bytes: int | None,
    ) -> None:
        """Begin with none.

        Args:
            tree: All blocks.
            changes: What the next step does with blocks; this adds to it.
            costs: What blocks take, and their files.
            limit_bytes: What those in the disk tier may take; None where there is no such tier.
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
        self._last: list[tuple[float, int, int, Block]] = []
        self._pushed = 0
        self._max_entries = _MIN_SWEPT_ENTRIES

    @property
    def count(self) -> int:
        """Blocks that it was asked to keep."""
        return len(self._by_digest)

    @property
    def file_bytes(self) -> int:
        """What their files take, about; this is what is limited."""
        return self.bytes + self.count * self._costs.bytes_per_file

    def set_limit(self, limit_bytes: int | None) -> None:
        """Keep less, or more, from now on."""
        self._limit_bytes = limit_bytes
        self.trim()

    def trim(self) -> None:
        """Keep no more than the limit allows."""
        if self._limit_bytes is not None:
            self._shrink(self._limit_bytes)

    def find(self, saved: Iterable[SavedBlock]) -> Iterator[Block]:
        """Take over what was kept since another day, parents first; what does not fit is forgotten."""
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
        """The block that is kept by that name."""
        return self._by_digest.get(digest)

    def save(self, block: Block) -> None:
        """Have a block kept, and first those before it that are in memory and are not kept yet.

        Those after it that waited for it come behind it. None is written before
        :meth:`write_waiting` says so.
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
        """Have those kept that follow one another from a root on and are not kept, or no longer."""
        if self._limit_bytes is not None:
            self._queue(one for one in blocks if self._is_unsaved(one))

    def write_waiting(self) -> None:
        """Write as many of those that are to be kept as a step may, parents first."""
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
        """Whether the next step may read one more."""
        return sum(isinstance(one, LoadBlock) for one in self._changes) < self.max_loads

    def load(self, block: Block) -> None:
        """Ask for a block to be read into memory."""
        self._changes.append(LoadBlock(block.block_id, _saved(block)))

    def forget(self, block: Block) -> None:
        """Keep a block no longer, if it was kept."""
        if not block.is_saved:
            return
        self._changes.append(ForgetSaved((block.digest,)))
        block.is_saved = False
        self.bytes -= block.nbytes
        del self._by_digest[block.digest]
        parent = block.before
        parent.saved_children -= 1
        self._offer(parent)

    def forget_all(self) -> set[Block]:
        """Keep nothing; returns what was kept."""
        blocks = set(self._by_digest.values())
        if blocks:
            self._changes.append(ForgetSaved(tuple(self._by_digest)))
        for block in blocks:
            block.is_saved = False
            block.before.saved_children = 0
        self.bytes = 0
        self._by_digest.clear()
        self._last.clear()
        return blocks

    def resize(self, block: Block, more_bytes: int) -> None:
        """Count that a block would take more than it did."""
        self.bytes += more_bytes if block.is_saved else 0

    def write_halves(self, head: Block, tail: Block) -> None:
        """Keep a block in two pieces that was kept in one and is about to be cut.

        Two files have one header more than one file, so the least valuable block may be evicted.
        """
        self._write(head)
        self._write(tail)
        self.trim()

    def check(self, blocks: Collection[Block]) -> None:
        """Assert that the books are those of the blocks in the tree."""
        saved = {block.digest: block for block in blocks if block.is_saved}
        assert saved == self._by_digest, "saved blocks are counted"
        assert self.bytes == sum(one.nbytes for one in saved.values()), "saved bytes add up"
        offered = {id(entry[3]) for entry in self._last}
        children = Counter(id(one.before) for one in saved.values())
        for block in blocks:
            assert block.saved_children == children[id(block)], "saved children are counted"
            assert not _is_last(block) or id(block) in offered, "what may go is found"

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
        self._offer(block)

    def _make_room(self, nbytes: int, keep: Collection[Block] = ()) -> bool:
        """Whether a block of so many bytes fits, after others went for it.

        Args:
            nbytes: What it would take in memory.
            keep: Blocks that have to stay, and with them all before them.
        """
        if self._limit_bytes is None:
            return True
        left_bytes = self._limit_bytes - nbytes - self._costs.bytes_per_file
        if left_bytes < 0:
            return False
        self._shrink(left_bytes, keep)
        return self.file_bytes <= left_bytes

    def _shrink(self, goal_bytes: int, keep: Collection[Block] = ()) -> None:
        """Forget what is worth least and nothing kept follows, until no more is kept than that."""
        spared: list[Block] = []
        while self._last and self.file_bytes > goal_bytes:
            priority, _, _, block = heapq.heappop(self._last)
            if not _is_last(block):
                continue
            if priority < block.priority:
                self._offer(block)  # it was used since
            elif block in keep:
                spared.append(block)
            else:
                self.forget(block)
                if not block.is_known:
                    self._tree.remove(block)
        for block in spared:
            self._offer(block)

    def _offer(self, block: Block) -> None:
        """Note that a block may be the next to go, if nothing kept follows it."""
        if not _is_last(block):
            return
        self._pushed += 1
        heapq.heappush(self._last, (block.priority, -block.stop, self._pushed, block))
        if len(self._last) > self._max_entries:
            current = {id(entry[3]): entry for entry in self._last if _is_last(entry[3])}
            self._last = list(current.values())
            heapq.heapify(self._last)
            self._max_entries = max(_MIN_SWEPT_ENTRIES, 2 * len(self._last))


def _is_last(block: Block) -> bool:
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
