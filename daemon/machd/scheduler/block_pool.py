"""The blocks in memory and on disk, each tier within its limit.

Work for the engine is queued as block changes of the next step. A block counts from its request on,
with its expected size, until the engine reports the real one.
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
from machd.scheduler.block_observer import BlockObserver, NoObserver
from machd.scheduler.block_tree import Block, BlockTree
from machd.scheduler.disk_tier import DiskTier
from machd.scheduler.eviction import EvictionOrder
from machd.scheduler.prefix_limits import BlockCosts, PrefixLimits

_Digest = bytes  # inside BlockPool that name is a property


@dataclass(frozen=True, slots=True)
class RowPosition:
    """A row to copy blocks from.

    Attributes:
        position: Number of its computed tokens; None if that is not known exactly.
    """

    slot_index: int
    position: int | None


class BlockPool:
    """The tree's blocks in memory and on disk.

    Attributes:
        changes: Block changes of the next step, in order.
        disk_tier: Blocks on disk, in memory as well or not.
        counts: Counts of the blocks in memory.
        evictions: Blocks evicted from memory.
        limit_bytes: Memory limit in force.
    """

    def __init__(
        self,
        tree: BlockTree,
        costs: BlockCosts,
        limits: PrefixLimits,
        observer: BlockObserver | None = None,
    ) -> None:
        """Start with an empty tree; ``observer`` is told which blocks are in memory."""
        self.tree = tree
        self._observer = observer or NoObserver()
        self.changes: list[BlockChange] = []
        self.disk_tier = DiskTier(tree, self.changes, costs, limits.disk_bytes)
        self.counts = BlockCounts()
        self.evictions = 0
        self._order = EvictionOrder(costs)
        self._costs = costs
        self._limits = limits
        self._available_bytes: int | None = None
        self.limit_bytes = limits.max_bytes
        self._by_id: dict[int, Block] = {}

    @property
    def bytes(self) -> int:
        """Size of the blocks in memory."""
        return self.counts.bytes

    @property
    def entries(self) -> int:
        """Leaf blocks in memory: texts."""
        return self.counts.entries

    def __len__(self) -> int:
        """Count blocks in memory or pending."""
        return len(self._by_id)

    def children_first(self) -> list[Block]:
        """Return the blocks in memory, children first."""
        return sorted(self._by_id.values(), key=lambda one: one.start, reverse=True)

    def can_keep(self, tokens: int) -> bool:
        """Return True if a block of so many tokens fits the memory limit by itself."""
        return self._costs.of(tokens, has_state=self._costs.is_stateful) <= self.limit_bytes

    def set_limits(self, limits: PrefixLimits) -> None:
        """Change the limits, and evict down to them."""
        self._limits = limits
        self._update_limit()
        self.disk_tier.set_limit(limits.disk_bytes)

    def observe(self, available_bytes: int | None) -> None:
        """Adapt the memory limit to the machine's free memory."""
        self._available_bytes = available_bytes
        self._update_limit()

    def shrink(self, max_bytes: int) -> bool:
        """Evict blocks down to ``max_bytes``, as far as rows allow; returns whether any was evicted."""
        evictions = self.evictions
        self.limit_bytes = max(0, min(self.limit_bytes, max_bytes))
        self._trim()
        return self.evictions > evictions

    def store(self, parent: Block, token_ids: tuple[int, ...], row: RowPosition) -> Block | None:
        """Copy tokens of a row into a new block behind ``parent``; None without room."""
        block = self.tree.add(parent, token_ids)
        if self.store_anew(block, row):
            return block
        self.tree.remove(block)
        return None

    def store_anew(self, block: Block, row: RowPosition) -> bool:
        """Copy a block out of a row again: it is not in memory, or lacks a snapshot; False without room."""
        has_state = row.position == block.stop
        expected = self._costs.of(len(block.token_ids), has_state=has_state)
        if not self._make_room(expected, after=block.before, besides=block):
            return False
        if self._costs.is_stateful and has_state != block.has_state:
            self.disk_tier.forget(block)
            block.has_state = has_state
        self._resize(block, expected)
        is_new, former_id, block.block_id = (
            not block.is_in_memory,
            block.block_id,
            self.tree.new_id(),
        )
        block.is_pending, block.is_held = True, False
        if is_new:
            self._enter_memory(block)
        else:  # it stays counted, under a new id
            del self._by_id[former_id]
            self.changes.append(DropBlocks((former_id,)))
            self._by_id[block.block_id] = block
            self._order.begin(block)
        self.changes.append(
            StoreBlock(block.block_id, row.slot_index, block.start, block.stop, has_state)
        )
        self.disk_tier.trim()  # its file may be larger than it was
        return True

    def split(self, block: Block, at: int) -> Block:
        """Split a block in memory; returns the part before ``at``."""
        assert block.is_held, "only a block in memory can be split"
        is_saved, nbytes = block.is_saved, block.nbytes
        self.disk_tier.forget(block)
        head = self.tree.split(block, at)
        head.is_held = True
        head.has_state = block.has_state and not self._costs.is_stateful
        head.uses, head.priority = block.uses, block.priority
        self.counts.split(head, block)
        # An estimate until the engine reports the size.
        head.nbytes = min(nbytes, self._costs.of(at, has_state=False))
        block.nbytes = nbytes - head.nbytes
        self._by_id[head.block_id] = head
        self.changes.append(SplitBlock(block.block_id, head.block_id, at))
        self._observer.was_split(head, block)
        if is_saved:
            self.disk_tier.write_halves(head, block)
        return head

    def load(self, blocks: Iterable[Block]) -> bool:
        """Load saved blocks into memory in order, as far as there is room.

        Returns:
            True if the rest waits for a later step, because the next one has enough to read.
        """
        for block in blocks:
            assert block.is_saved, "a block not in memory is on disk"
            if not self.disk_tier.has_load_room:
                return True
            if not self._make_room(block.nbytes, after=block.before):
                return False
            block.is_pending = True
            self._enter_memory(block)
            self.disk_tier.load(block)
        return False

    def find_saved(self, saved: Iterable[SavedBlock]) -> None:
        """Add blocks saved by an earlier daemon, parents first."""
        saved = tuple(saved)
        times_s = sorted({one.used_unix_s for one in saved})
        shares = {used_s: (rank + 1) / len(times_s) for rank, used_s in enumerate(times_s)}
        used_s = {one.digest: one.used_unix_s for one in saved}
        for block in self.disk_tier.find(saved):
            self._order.begin(block)
            block.priority *= shares[used_s[block.digest]]  # recently used is worth more

    def use(self, blocks: Collection[Block]) -> None:
        """Count a prompt that begins with these blocks, and save those that are not on disk."""
        for block in blocks:
            self._order.use(block)
        self.disk_tier.save_path(blocks)

    def pin(self, block: Block) -> None:
        """Protect a block and the path to it from eviction."""
        self.counts.pin(block)

    def unpin(self, block: Block) -> None:
        """Undo :meth:`pin`."""
        self.counts.pin(block, -1)
        self._order.offer(block)
        self._trim()

    def confirm(
        self, held: Iterable[HeldBlock], lost: Iterable[int], unsaved: Iterable[_Digest] = ()
    ) -> None:
        """Apply the engine's result of the changes.

        Args:
            held: Blocks in memory now.
            lost: Ids of blocks that could not be stored or loaded.
            unsaved: Digests of blocks that the disk tier failed to save or has lost.
        """
        known = [(self._by_id[one.block_id], one) for one in held if one.block_id in self._by_id]
        for block, one in known:
            if block.has_state != one.has_state:
                self.disk_tier.forget(block)  # the file has the expected state
            self._resize(block, self._costs.counted(one.nbytes))
            block.has_state = one.has_state
            block.is_held, block.is_pending = True, False
            self._observer.entered(block)
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
        """Drop every block that no running row holds; returns how many left memory or disk."""
        forgotten = self.disk_tier.forget_all() if is_disk_included else set()
        count, dropped = len(forgotten), []
        for block in sorted(self.tree, key=lambda one: one.start, reverse=True):
            if block.is_in_memory and not block.holds:
                self._leave_memory(block, is_told=False)
                dropped.append(block.block_id)
                count += block not in forgotten
            if not block.is_known:
                self._remove(block)  # and files of descendants, now unreachable
        if dropped:
            self.changes.append(DropBlocks(tuple(dropped)))
        if not self._by_id:
            self._observer.cleared()
        self.tree.forget_empty_roots()
        return count

    def lose_memory(self) -> None:
        """Drop all blocks in memory: after an engine fault it is unknown which changes were made."""
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
                    pass  # a block that was not saved is reported when it is loaded
        dropped = [DropBlocks(tuple(sorted(unsure)))] if unsure else []
        self.changes[:] = [*dropped, *forgotten]
        for block in self.children_first():
            self._leave_memory(block, is_told=False)
            if not block.is_saved:
                self._remove(block)
        self._observer.cleared()

    def check_invariants(self) -> None:
        """Assert that counts and bytes match the blocks of the tree."""
        blocks = list(self.tree)
        in_memory = {block.block_id: block for block in blocks if block.is_in_memory}
        assert in_memory == self._by_id, "the tree has all blocks"
        self.counts.check(blocks)
        self.disk_tier.check(blocks)
        for block in blocks:
            self.check(block)

    def check(self, block: Block) -> None:
        """Assert the invariants of a block of the tree."""
        parent = block.before
        assert block.is_known, "blocks of the tree are in memory or on disk"
        assert parent.stop == block.start, "blocks follow one another"
        assert parent.children[block.token_ids[0]] is block, "blocks are found by their tokens"
        if block.is_in_memory:
            assert parent.is_usable, "parents of a block in memory are in memory"
            assert self._by_id.get(block.block_id) is block, "blocks are found by id"

    def _take_as_unsaved(self, digest: _Digest) -> None:
        """Note that a block is not on disk; its next use saves it again."""
        block = self.disk_tier.known_as(digest)
        if block is not None:
            # A later save may have been queued: delete it, too, so that no file goes uncounted.
            self.disk_tier.forget(block)
            if not block.is_known:
                self._remove(block)

    def _resize(self, block: Block, nbytes: int) -> None:
        """Set the size of a block."""
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
        """Remove a block from memory; ``is_told`` queues the change for the engine."""
        del self._by_id[block.block_id]
        self.counts.leave(block)
        block.is_held = block.is_pending = False
        self._observer.left(block)
        parent = block.before
        if not parent.memory_children:
            self._order.offer(parent)
        if is_told:
            self.changes.append(DropBlocks((block.block_id,)))

    def _remove(self, block: Block) -> None:
        """Remove a block and its descendants from tree, memory and disk."""
        for one in reversed(self.tree.remove(block)):
            if one.is_in_memory:
                self._leave_memory(one)
            self.disk_tier.forget(one)

    def _evict(self, keep: Collection[Block] = ()) -> Block | None:
        """Evict the lowest-priority leaf block outside ``keep``; returns its parent, if any went."""
        victim = self._order.take(keep)
        if victim is None:
            return None
        self._drop(victim)
        return victim.before

    def _evict_entry(self, keep: Collection[Block] = ()) -> bool:
        """Evict the text of lowest priority, but for shared blocks; returns whether any block went."""
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
        """Evict a block from memory, and from the tree unless it is saved."""
        self.evictions += 1
        self._leave_memory(block)
        if not block.is_saved:
            self._remove(block)

    def _make_room(self, nbytes: int, *, after: Block, besides: Block | None = None) -> bool:
        """Evict blocks for a new one; returns whether it fits.

        Args:
            nbytes: Size of the new block.
            after: Its parent, which is kept.
            besides: A block in memory that it replaces, which is kept as well.
        """
        if nbytes > self.limit_bytes:
            return False
        keep = (after,) if besides is None else (after, besides)
        is_replaced = besides is not None and besides.is_in_memory
        freed = besides.nbytes if besides is not None and is_replaced else 0
        while self.bytes + nbytes - freed > self.limit_bytes:
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
        """Evict blocks down to the limits, as far as rows allow."""
        while self.bytes > self.limit_bytes:
            if self._evict() is None:
                return
        max_entries = self._limits.max_entries
        while max_entries is not None and self.entries > max_entries:
            if not self._evict_entry():
                return

    def _update_limit(self) -> None:
        self.limit_bytes = self._limits.memory_bytes(self.bytes, self._available_bytes)
        self._trim()
