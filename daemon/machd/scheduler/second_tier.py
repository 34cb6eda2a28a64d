"""The books of the second tier: which blocks it was asked to keep, and what they would take in memory.

A block is kept there only behind what comes before it, or nobody could find it again. The tier itself
is the engine's; all that is known here is what it was asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator

from machd.engine.block_protocol import BlockChange, ForgetSaved, LoadBlock, SaveBlock, SavedBlock
from machd.scheduler.block_tree import Block, BlockTree

__all__ = ["SecondTier"]


class SecondTier:
    """The tree's blocks that outlive the daemon.

    Attributes:
        bytes: What they would take in memory.
        count: Of them.
    """

    def __init__(
        self, tree: BlockTree, changes: list[BlockChange], limit_bytes: int | None
    ) -> None:
        """Begin with none.

        Args:
            tree: All blocks.
            changes: What the next step does with blocks; this adds to it.
            limit_bytes: What those in the second tier may take; None where there is no such tier.
        """
        self.bytes = self.count = 0
        self._tree = tree
        self._changes = changes
        self._limit_bytes = limit_bytes

    def set_limit(self, limit_bytes: int | None) -> None:
        """Keep less, or more, from now on."""
        self._limit_bytes = limit_bytes
        self._make_room(0)

    def find(self, saved: Iterable[SavedBlock]) -> Iterator[Block]:
        """Take over what was kept since another day, parents first; what does not fit is forgotten."""
        by_digest: dict[bytes, Block] = {}
        for one in saved:
            parent = self._tree.root_of(one.parent) if not one.start else by_digest.get(one.parent)
            is_fit = (
                parent is not None
                and parent.stop == one.start
                and one.token_ids
                and one.token_ids[0] not in parent.children
                and one.digest not in by_digest
            )
            if parent is None or not is_fit:
                self._changes.append(ForgetSaved((one.digest,)))
                continue
            block = self._tree.add(parent, one.token_ids, digest=one.digest)
            by_digest[one.digest] = block
            block.nbytes, block.has_state = one.nbytes, one.has_state
            self._count_in(block)
            yield block
        self._make_room(0)

    def save(self, block: Block) -> None:
        """Keep a block, and those after it that waited for it."""
        waiting = [block]
        while waiting:
            one = waiting.pop()
            if self._can_save(one) and self._make_room(one.nbytes, keep=(one.before,)):
                self._write(one)
                waiting += one.children.values()

    def load(self, block: Block) -> None:
        """Ask for a block to be read into memory."""
        self._changes.append(LoadBlock(block.block_id, _saved(block)))

    def forget(self, block: Block) -> None:
        """Keep a block no longer, if it was kept."""
        if block.is_saved:
            block.is_saved = False
            self.bytes -= block.nbytes
            self.count -= 1
            self._changes.append(ForgetSaved((block.digest,)))

    def write_halves(self, head: Block, tail: Block) -> None:
        """Keep a block in two pieces that was kept in one and is about to be cut."""
        self._write(head)
        self._write(tail)

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
        self.count += 1

    def _make_room(self, nbytes: int, keep: Collection[Block] = ()) -> bool:
        """Whether so many bytes more fit, after others went for it.

        Args:
            nbytes: What is to come.
            keep: Blocks that have to stay, and with them all before them.
        """
        limit_bytes = self._limit_bytes
        if limit_bytes is None or self.bytes + nbytes <= limit_bytes:
            return True
        if nbytes > limit_bytes:
            return False
        # Rare and in one go: a tenth of the tier is freed at once.
        self._shrink(max(limit_bytes - nbytes - limit_bytes // 10, 0), keep)
        return self.bytes + nbytes <= limit_bytes

    def _shrink(self, goal_bytes: int, keep: Collection[Block]) -> None:
        """Forget what is worth least and nothing kept follows, until no more is kept than that."""
        children: dict[int, int] = {}
        saved = [one for one in self._tree if one.is_saved]
        for one in saved:
            children[id(one.before)] = children.get(id(one.before), 0) + 1
        last = [(one.priority, -one.stop, one.block_id, one) for one in saved]
        last = [entry for entry in last if id(entry[3]) not in children]
        heapq.heapify(last)
        while last and self.bytes > goal_bytes:
            block = heapq.heappop(last)[3]
            if block in keep:
                continue
            parent = block.before
            self.forget(block)
            if not block.is_known:
                self._tree.remove(block)
            children[id(parent)] -= 1
            if not children[id(parent)] and parent.is_saved:
                heapq.heappush(last, (parent.priority, -parent.stop, parent.block_id, parent))


def _saved(block: Block) -> SavedBlock:
    return SavedBlock(
        digest=block.digest,
        parent=block.before.digest,
        start=block.start,
        token_ids=block.token_ids,
        has_state=block.has_state,
        nbytes=block.nbytes,
    )
