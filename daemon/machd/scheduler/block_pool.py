"""What is kept of blocks: in memory within a limit, in the disk tier within another.

Everything that the engine has to do for it is queued as a change, which the next step makes. A block
counts from the moment it is asked for, with what it is expected to take, and with what it really
takes once the engine has said so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from machd.engine.protocol.blocks import (
    BlockChange,
    DropBlocks,
    ForgetSaved,
    HeldBlock,
    LoadBlock,
    SavedBlock,
    SplitBlock,
    StoreBlock,
)
from machd.scheduler.block_counts import BlockCounts
from machd.scheduler.block_tree import Block, BlockTree
from machd.scheduler.disk_tier import DiskTier
from machd.scheduler.eviction import EvictionOrder
from machd.scheduler.prefix_limits import BlockCosts, PrefixLimits

_Digest = bytes


@dataclass(frozen=True, slots=True)
class RowPosition:
    """Where a row is, that blocks are copied from.

    Attributes:
        position: How many of its tokens are computed, or None where that is not known exactly.
    """

    slot_index: int
    position: int | None


class BlockPool:
    """The tree's blocks, and where each of them is.

    Attributes:
        changes: What the next step has to do, in order.
        disk_tier: Blocks that are kept besides, or only there.
        counts: Of those in memory.
        evictions: Blocks that made room for others.
    """

    def __init__(self, tree: BlockTree, costs: BlockCosts, limits: PrefixLimits) -> None:
        """Begin with an empty tree."""
        self.tree = tree
        self.changes: list[BlockChange] = []
        self.disk_tier = DiskTier(tree, self.changes, costs, limits.disk_bytes)
        self.counts = BlockCounts()
        self.evictions = 0
        self._order = EvictionOrder(costs)
        self._costs = costs
        self._limits = limits
        self._available_bytes: int | None = None
        self._limit_bytes = limits.max_bytes
        self._by_id: dict[int, Block] = {}

    @property
    def bytes(self) -> int:
        """What those in memory take."""
        return self.counts.bytes

    @property
    def entries(self) -> int:
        """Those in memory that nothing there follows: texts."""
        return self.counts.entries

    @property
    def limit_bytes(self) -> int:
        """What blocks may take in memory now."""
        return self._limit_bytes

    def __len__(self) -> int:
        """Blocks in memory, or on their way there."""
        return len(self._by_id)

    def __contains__(self, block: Block) -> bool:
        """Whether it is in memory, or on its way there; roots always are."""
        return block.is_root or block.is_in_memory

    def children_first(self) -> list[Block]:
        """Those in memory, those that begin last first."""
        return sorted(self._by_id.values(), key=lambda one: one.start, reverse=True)

    def can_keep(self, tokens: int) -> bool:
        """Whether a block of so many tokens could be kept if nothing else was."""
        return self._costs.of(tokens, has_state=self._costs.is_stateful) <= self._limit_bytes

    def set_limits(self, limits: PrefixLimits) -> None:
        """Keep less, or more, from now on."""
        self._limits = limits
        self._look_at_memory()
        self.disk_tier.set_limit(limits.disk_bytes)

    def observe(self, available_bytes: int | None) -> None:
        """Take in what the machine has left, and keep less if that is too little."""
        self._available_bytes = available_bytes
        self._look_at_memory()

    def shrink(self, max_bytes: int) -> bool:
        """Evict blocks until they take ``max_bytes`` or running rows hold all that are left.

        Returns:
            Whether any block was evicted.
        """
        evictions = self.evictions
        self._limit_bytes = max(0, min(self._limit_bytes, max_bytes))
        self._trim()
        return self.evictions > evictions

    def store(self, parent: Block, token_ids: tuple[int, ...], row: RowPosition) -> Block | None:
        """Copy what a row has of ``token_ids`` into a new block; None where there is no room."""
        has_state = row.position == parent.stop + len(token_ids)
        nbytes = self._costs.of(len(token_ids), has_state=has_state)
        if not self._make_room(nbytes, after=parent):
            return None
        block = self.tree.add(parent, token_ids)
        block.nbytes = nbytes
        self._ask_for(block, row, has_state=has_state)
        return block

    def store_anew(self, block: Block, row: RowPosition) -> bool:
        """Copy a block's positions out of a row, because it is not in memory or lacks its state."""
        has_state = row.position == block.stop
        expected = self._costs.of(len(block.token_ids), has_state=has_state)
        if not self._make_room(expected, after=block.before, besides=block):
            return False
        if self._costs.is_stateful and has_state != block.has_state:
            self.disk_tier.forget(block)
        self._resize(block, expected)
        if block.is_in_memory:  # it stays where it is counted, by another number
            del self._by_id[block.block_id]
            self.changes.append(DropBlocks((block.block_id,)))
        block.block_id = self.tree.new_id()
        self._ask_for(block, row, has_state=has_state)
        self.disk_tier.trim()  # its file may be larger than it was
        return True

    def split(self, block: Block, at: int) -> Block:
        """Cut a block that is in memory; returns the part before ``at``."""
        assert block.is_held, "only what is in memory can be cut"
        is_saved, nbytes = block.is_saved, block.nbytes
        self.disk_tier.forget(block)
        head = self.tree.split(block, at)
        head.is_held = True
        head.has_state = block.has_state and not self._costs.is_stateful
        head.uses, head.priority = block.uses, block.priority
        self.counts.split(head, block)
        # About so much, until the engine says it.
        head.nbytes = min(nbytes, self._costs.of(at, has_state=False))
        block.nbytes = nbytes - head.nbytes
        self._by_id[head.block_id] = head
        self.changes.append(SplitBlock(block.block_id, head.block_id, at))
        if is_saved:
            self.disk_tier.write_halves(head, block)
        return head

    def load(self, blocks: Iterable[Block]) -> bool:
        """Bring saved blocks back into memory, from the first on, as far as there is room.

        Returns:
            Whether others are to be asked for after the next step, because that has enough to read.
        """
        for block in blocks:
            assert block.is_saved, "what is nowhere is not in the tree"
            if not self.disk_tier.has_load_room:
                return True
            if not self._make_room(block.nbytes, after=block.before):
                return False
            block.is_pending = True
            self._enter_memory(block)
            self.disk_tier.load(block)
        return False

    def find_saved(self, saved: Iterable[SavedBlock]) -> None:
        """Take over what the disk tier has kept since another day, parents first."""
        saved = tuple(saved)
        times_s = sorted({one.used_unix_s for one in saved})
        shares = {used_s: (rank + 1) / len(times_s) for rank, used_s in enumerate(times_s)}
        used_s = {one.digest: one.used_unix_s for one in saved}
        for block in self.disk_tier.find(saved):
            self._order.begin(block)
            block.priority *= shares[used_s[block.digest]]  # what was used last is worth most

    def use(self, blocks: Collection[Block]) -> None:
        """Count that a prompt begins with these, and have the disk tier keep what it does not."""
        for block in blocks:
            self._order.use(block)
        self.disk_tier.save_path(blocks)

    def pin(self, block: Block) -> None:
        """Keep a block, and with it all before it, until it is let go."""
        self.counts.pin(block)

    def unpin(self, block: Block) -> None:
        """Let a block go again."""
        self.counts.unpin(block)
        self._order.offer(block)
        self._trim()

    def confirm(
        self, held: Iterable[HeldBlock], lost: Iterable[int], unsaved: Iterable[_Digest] = ()
    ) -> None:
        """Take in what the engine made of the changes.

        Args:
            held: Blocks that are in memory now.
            lost: Those that could not be brought there.
            unsaved: What the disk tier was to keep, and does not.
        """
        known = [(self._by_id[one.block_id], one) for one in held if one.block_id in self._by_id]
        for block, one in known:
            if block.has_state != one.has_state:
                self.disk_tier.forget(block)  # that one is as it was expected to be
            self._resize(block, self._costs.counted(one.nbytes))
            block.has_state = one.has_state
            block.is_held, block.is_pending = True, False
            self._order.offer(block)
        for block_id in lost:
            if block_id in self._by_id:
                self._remove(self._by_id[block_id])
        for digest in unsaved:
            self._take_as_unsaved(digest)
        self._trim()
        self.disk_tier.trim()
        for block, _ in known:
            self.disk_tier.save(block)
        self.disk_tier.write_waiting()

    def clear(self, *, is_disk_included: bool) -> int:
        """Forget every block that no running row needs; returns how many left memory or disk."""
        forgotten = self.disk_tier.forget_all() if is_disk_included else set()
        count, dropped = len(forgotten), []
        for block in sorted(self.tree, key=lambda one: one.start, reverse=True):
            if block.is_in_memory and not block.holds:
                self._leave_memory(block, is_told=False)
                dropped.append(block.block_id)
                count += block not in forgotten
            if not block.is_known:
                self._remove(block)  # and files that nobody would find any more
        if dropped:
            self.changes.append(DropBlocks(tuple(dropped)))
        self.tree.forget_empty_roots()
        return count

    def lose_memory(self) -> None:
        """After an engine fault nobody knows which changes were made: nothing in memory counts."""
        unsure = set(self._by_id)
        forgotten: list[BlockChange] = []
        for change in self.changes:
            match change:
                case DropBlocks(block_ids):
                    unsure.update(block_ids)
                case StoreBlock() | LoadBlock():
                    unsure.add(change.block_id)
                case SplitBlock():
                    unsure |= {change.block_id, change.head_id}
                case ForgetSaved():
                    forgotten.append(change)
                case _:
                    pass  # what was not saved is found out when it is loaded
        dropped = [DropBlocks(tuple(sorted(unsure)))] if unsure else []
        self.changes[:] = [*dropped, *forgotten]
        for block in self.children_first():
            self._leave_memory(block, is_told=False)
            if not block.is_saved:
                self._remove(block)

    def check_invariants(self) -> None:
        """Assert that counts and bytes are those of the blocks in the tree."""
        blocks = list(self.tree)
        in_memory = {block.block_id: block for block in blocks if block.is_in_memory}
        assert in_memory == self._by_id, "the tree has all blocks"
        self.counts.check(blocks)
        self.disk_tier.check(blocks)
        for block in blocks:
            self._check(block)

    def check_path(self, last: Block) -> None:
        """Assert that a block and those before it are what they should be."""
        for block in last.path():
            self._check(block)

    def _check(self, block: Block) -> None:
        parent = block.before
        assert block.is_known, "what is kept nowhere is not in the tree"
        assert parent.stop == block.start, "blocks follow one another"
        assert parent.children[block.token_ids[0]] is block, "blocks are found by their tokens"
        if block.is_in_memory:
            assert parent in self, "what comes before is there, too"
            assert self._by_id.get(block.block_id) is block, "blocks are found by their numbers"

    def _ask_for(self, block: Block, row: RowPosition, *, has_state: bool) -> None:
        """Have a block copied out of a row; its size is what is expected."""
        is_new = not block.is_in_memory
        block.is_pending, block.is_held = True, False
        if self._costs.is_stateful:
            block.has_state = has_state
        if is_new:
            self._enter_memory(block)
        else:
            self._by_id[block.block_id] = block
            self._order.begin(block)
        self.changes.append(
            StoreBlock(block.block_id, row.slot_index, block.start, block.stop, has_state)
        )

    def _take_as_unsaved(self, digest: _Digest) -> None:
        """The disk tier misses a block; it is written again when it is of use."""
        block = self.disk_tier.known_as(digest)
        if block is not None:
            # It may have been asked for once more since: nothing is to be there that is not counted.
            self.disk_tier.forget(block)
            if not block.is_known:
                self._remove(block)

    def _resize(self, block: Block, nbytes: int) -> None:
        """Take in what a block really takes."""
        more_bytes = nbytes - block.nbytes
        block.nbytes = nbytes
        if block.is_in_memory:
            self.counts.resize(block, more_bytes)
        self.disk_tier.resize(block, more_bytes)

    def _enter_memory(self, block: Block) -> None:
        self._by_id[block.block_id] = block
        self.counts.enter(block)
        self._order.begin(block)

    def _leave_memory(self, block: Block, *, is_told: bool = True) -> None:
        """Count a block out; the engine gives its memory back if it is told."""
        del self._by_id[block.block_id]
        self.counts.leave(block)
        block.is_held = block.is_pending = False
        parent = block.before
        if not parent.memory_children:
            self._order.offer(parent)
        if is_told:
            self.changes.append(DropBlocks((block.block_id,)))

    def _remove(self, block: Block) -> None:
        """Take a block and all that follow it out, wherever they are."""
        for one in reversed(self.tree.remove(block)):
            if one.is_in_memory:
                self._leave_memory(one)
            self.disk_tier.forget(one)

    def _evict(self, keep: Collection[Block] = ()) -> Block | None:
        """Drop the block that is worth least; returns what it followed, None if none could go.

        Args:
            keep: Blocks that have to stay.
        """
        victim = self._order.take(keep)
        if victim is None:
            return None
        self._drop(victim)
        return victim.before

    def _evict_entry(self, keep: Collection[Block] = ()) -> bool:
        """Drop the text that ends with the block that is worth least; returns whether one went.

        What other texts begin with stays, and what is left of one is another time's.
        """
        entries = self.entries
        last = self._evict(keep)
        is_any = last is not None
        while last is not None and self.entries >= entries:
            if not last.is_evictable or last in keep:
                break
            self._drop(last)
            last = last.before
        return is_any

    def _drop(self, block: Block) -> None:
        """Give back a block's memory; without a copy elsewhere it is gone."""
        self.evictions += 1
        self._leave_memory(block)
        if not block.is_saved:
            self._remove(block)

    def _make_room(self, nbytes: int, *, after: Block, besides: Block | None = None) -> bool:
        """Whether a block of so many bytes fits, after others went for it.

        Args:
            nbytes: What it will take.
            after: The block that it follows, which has to stay.
            besides: A block whose place it takes, where that is in memory.
        """
        if nbytes > self._limit_bytes:
            return False
        keep = (after,) if besides is None else (after, besides)
        is_replaced = besides is not None and besides.is_in_memory
        freed = besides.nbytes if besides is not None and is_replaced else 0
        while self.bytes + nbytes - freed > self._limit_bytes:
            if self._evict(keep) is None:
                return False
        is_new_entry = not is_replaced and (after.is_root or bool(after.memory_children))
        max_entries = self._limits.max_entries
        while max_entries is not None and is_new_entry and self.entries >= max_entries:
            if not self._evict_entry(keep):
                return False
            is_new_entry = after.is_root or bool(after.memory_children)
        return True

    def _trim(self) -> None:
        """Keep no more than the limits allow, as soon as rows let go of it."""
        while self.bytes > self._limit_bytes:
            if self._evict() is None:
                return
        max_entries = self._limits.max_entries
        while max_entries is not None and self.entries > max_entries:
            if not self._evict_entry():
                return

    def _look_at_memory(self) -> None:
        self._limit_bytes = self._limits.memory_bytes(self.bytes, self._available_bytes)
        self._trim()
