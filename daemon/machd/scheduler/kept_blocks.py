"""What is kept of blocks: in memory within a limit, in the second tier within another.

Everything that the engine has to do for it is queued as a change, which the next step makes. A block
counts from the moment it is asked for, with what it is expected to take, and with what it really
takes once the engine has said so.

Whatever has to go is what is worth least: the block with the lowest priority that no running row
needs and that nothing in memory follows. The priority is GreedyDual-Size-Frequency's (Cherkasova,
1998): what went last, plus what it cost to compute for each of its bytes, times how often it was of
use. So a block that is not used sinks, a block often used sinks slower, and a long text is kept for as
long as its beginnings are in use.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from machd.engine.block_protocol import (
    BlockChange,
    DropBlocks,
    ForgetSaved,
    HeldBlock,
    LoadBlock,
    SaveBlock,
    SavedBlock,
    SplitBlock,
    StoreBlock,
)
from machd.scheduler.block_tree import Block, BlockTree
from machd.scheduler.prefix_limits import BlockCosts, PrefixLimits

__all__ = ["KeptBlocks", "RowStand"]

_MAX_USES = 32
"""More do not make a block worth more: what was popular once has to go some day."""

_MAX_STALE = 4
"""Entries of the heap for each block, after which those that no longer hold are swept out."""

_ATTENTION_TOKENS = 8192
"""From this position on a token costs about twice as much to compute as the first one."""


@dataclass(frozen=True, slots=True)
class RowStand:
    """Where a row is, that blocks are copied from.

    Attributes:
        position: How many of its tokens are computed, or None where that is not known exactly.
    """

    slot_index: int
    position: int | None


class KeptBlocks:
    """The tree's blocks, and where each of them is."""

    def __init__(self, tree: BlockTree, costs: BlockCosts, limits: PrefixLimits) -> None:
        """Begin with an empty tree."""
        self.tree = tree
        self.changes: list[BlockChange] = []
        self.evictions = 0
        self.bytes = 0
        self.saved_bytes = 0
        self.saved_count = 0
        self.entries = 0
        self._costs = costs
        self._limits = limits
        self._available_bytes: int | None = None
        self._limit_bytes = limits.max_bytes
        self._by_id: dict[int, Block] = {}
        self._clock = 0.0
        self._disk_clock = 0.0
        self._pushed = 0
        self._leaves: list[tuple[float, int, Block]] = []

    @property
    def limit_bytes(self) -> int:
        """What blocks may take in memory now."""
        return self._limit_bytes

    def __len__(self) -> int:
        """Blocks in memory, or on their way there."""
        return len(self._by_id)

    def __contains__(self, block: Block) -> bool:
        """Whether it is in memory, or on its way there; roots always are."""
        return block.is_root or self._by_id.get(block.block_id) is block

    def set_limits(self, limits: PrefixLimits) -> None:
        """Keep less, or more, from now on."""
        self._limits = limits
        self._look_at_memory()
        self._make_disk_room(0)

    def observe(self, available_bytes: int | None) -> None:
        """Take in what the machine has left, and keep less if that is too little."""
        self._available_bytes = available_bytes
        self._look_at_memory()

    def store(self, parent: Block, token_ids: tuple[int, ...], row: RowStand) -> Block | None:
        """Copy what a row has of ``token_ids`` into a new block; None where there is no room."""
        stop = parent.stop + len(token_ids)
        has_state = row.position == stop
        if not self._make_room(self._costs.of(len(token_ids), has_state=has_state), after=parent):
            return None
        block = self.tree.add(parent, token_ids)
        self._ask_for(block, row, has_state=has_state)
        return block

    def store_anew(self, block: Block, row: RowStand) -> bool:
        """Copy a block's positions out of a row, because it is not in memory or lacks its state."""
        has_state = row.position == block.stop
        expected = self._costs.of(len(block.token_ids), has_state=has_state)
        if not self._make_room(expected, after=block.parent, besides=block):
            return False
        if block.is_in_memory:
            self._leave_memory(block)
            self.changes.append(DropBlocks((block.block_id,)))
        self._forget_saved(block)
        block.block_id = self.tree.new_id()
        self._ask_for(block, row, has_state=has_state)
        return True

    def split(self, block: Block, at: int) -> Block:
        """Cut a block that is in memory; returns the part before ``at``."""
        assert block.is_in_memory, "only what is in memory can be cut"
        before = block.nbytes
        self._forget_saved(block)
        head = self.tree.split(block, at)
        head.is_held, head.is_pending = block.is_held, block.is_pending
        head.uses, head.priority = block.uses, block.priority
        head.memory_children = 1
        # About so much, until the engine says it.
        head.nbytes = min(before, self._costs.of(at, has_state=False))
        block.nbytes = before - head.nbytes
        self._by_id[head.block_id] = head
        self.changes.append(SplitBlock(block.block_id, head.block_id, at))
        return head

    def load(self, blocks: Iterable[Block]) -> None:
        """Bring saved blocks back into memory, from the first on, as far as there is room."""
        for block in blocks:
            if block.is_in_memory:
                continue
            assert block.is_saved, "what is nowhere is not in the tree"
            if not self._make_room(block.nbytes, after=block.parent):
                return
            block.is_pending = True
            self._enter_memory(block)
            self.changes.append(LoadBlock(block.block_id, self._saved(block)))

    def find_saved(self, saved: Iterable[SavedBlock]) -> None:
        """Take over what the second tier has kept since another day, parents first."""
        by_digest: dict[bytes, Block] = {}
        for one in saved:
            parent = self.tree.root_of(one.parent) if one.start == 0 else by_digest.get(one.parent)
            is_fit = (
                parent is not None
                and parent.stop == one.start
                and one.token_ids
                and one.token_ids[0] not in parent.children
            )
            if parent is None or not is_fit:
                self.changes.append(ForgetSaved((one.digest,)))
                continue
            block = by_digest[one.digest] = self.tree.add(parent, one.token_ids)
            block.nbytes, block.has_state, block.is_saved = one.nbytes, one.has_state, True
            block.priority = self._worth(block)
            self.saved_bytes += block.nbytes
            self.saved_count += 1
        self._make_disk_room(0)

    def use(self, blocks: Iterable[Block]) -> None:
        """Count that a prompt begins with these."""
        for block in blocks:
            block.uses = min(block.uses + 1, _MAX_USES)
            block.priority = self._clock + self._worth(block)
            self._offer(block)

    def pin(self, block: Block) -> None:
        """Keep a block, and with it all before it, until it is let go."""
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """Let a block go again."""
        assert block.pins > 0, "pinned before"
        block.pins -= 1
        self._offer(block)
        self._trim()

    def confirm(self, held: Iterable[HeldBlock], lost: Iterable[int]) -> None:
        """Take in what the engine made of the changes."""
        for one in held:
            block = self._by_id.get(one.block_id)
            if block is not None:
                self.bytes += one.nbytes - block.nbytes
                if block.is_saved:
                    self.saved_bytes += one.nbytes - block.nbytes
                block.nbytes, block.has_state = one.nbytes, one.has_state
                block.is_held, block.is_pending = True, False
                self._offer(block)
        for block_id in lost:
            block = self._by_id.get(block_id)
            if block is not None:
                self._remove(block)
        self._trim()
        for one in held:
            block = self._by_id.get(one.block_id)
            if block is not None:
                self._save(block)

    def clear(self, *, is_disk_included: bool) -> int:
        """Forget every block that no running row needs; returns how many left memory or disk."""
        before = len(self._by_id) + self.saved_count
        if is_disk_included:
            for block in list(self.tree):
                self._forget_saved(block)
        for block in sorted(self.tree, key=lambda one: one.start, reverse=True):
            if self._is_evictable(block):
                self._drop(block)
            elif not block.is_in_memory and not block.is_saved and not block.children:
                self._remove(block)
        self.tree.forget_empty_roots()
        return before - len(self._by_id) - self.saved_count

    def lose_memory(self) -> None:
        """After an engine fault nobody knows which changes were made: nothing in memory counts."""
        self.changes = [DropBlocks(tuple(self._by_id))] if self._by_id else []
        for block in list(self._by_id.values()):
            if block.is_saved:
                self._leave_memory(block)
            else:
                self._remove(block)

    def check_invariants(self) -> None:
        """Assert that counts and bytes are those of the blocks in the tree."""
        in_memory = [block for block in self.tree if block.is_in_memory]
        saved = [block for block in self.tree if block.is_saved]
        assert {one.block_id: one for one in in_memory} == self._by_id, "the tree has all blocks"
        assert self.bytes == sum(one.nbytes for one in in_memory), "bytes of blocks add up"
        assert self.saved_count == len(saved), "saved blocks are counted"
        assert self.saved_bytes == sum(one.nbytes for one in saved), "saved bytes add up"
        for block in self.tree:
            children = sum(one.is_in_memory for one in block.children.values())
            assert block.memory_children == children, "children in memory are counted"
            assert block.is_in_memory or block.is_saved, "a block is somewhere"
            parent = block.parent
            assert parent is not None, "only roots have no parent"
            assert parent.stop == block.start, "blocks follow one another"
            if block.is_in_memory:
                assert parent.is_root or parent.is_in_memory, "what comes before is there, too"
        assert self.entries == sum(not one.memory_children for one in in_memory), "entries add up"

    def _ask_for(self, block: Block, row: RowStand, *, has_state: bool) -> None:
        block.is_pending, block.is_held = True, False
        block.has_state = has_state
        block.nbytes = self._costs.of(len(block.token_ids), has_state=has_state)
        self._enter_memory(block)
        self.changes.append(
            StoreBlock(block.block_id, row.slot_index, block.start, block.stop, has_state)
        )

    def _enter_memory(self, block: Block) -> None:
        self._by_id[block.block_id] = block
        self.bytes += block.nbytes
        if not block.memory_children:
            self.entries += 1
        parent = block.parent
        assert parent is not None, "a root takes no memory"
        parent.memory_children += 1
        if parent.memory_children == 1 and not parent.is_root:
            self.entries -= 1
        block.priority = max(block.priority, self._clock + self._worth(block))

    def _leave_memory(self, block: Block) -> None:
        del self._by_id[block.block_id]
        self.bytes -= block.nbytes
        if not block.memory_children:
            self.entries -= 1
        block.is_held = block.is_pending = False
        parent = block.parent
        assert parent is not None, "a root takes no memory"
        parent.memory_children -= 1
        if not parent.memory_children and not parent.is_root:
            self.entries += 1
            self._offer(parent)

    def _remove(self, block: Block) -> None:
        """Take a block and all that follow it out, wherever they are."""
        for one in reversed(self.tree.remove(block)):
            if one.is_in_memory:
                self._leave_memory(one)
                self.changes.append(DropBlocks((one.block_id,)))
            self._forget_saved(one)

    def _drop(self, block: Block) -> None:
        """Give back a block's memory; without a copy elsewhere it is gone."""
        if not block.is_saved:
            self._remove(block)
            return
        self._leave_memory(block)
        self.changes.append(DropBlocks((block.block_id,)))

    def _is_evictable(self, block: Block) -> bool:
        return block.is_held and not block.pins and not block.memory_children

    def _offer(self, block: Block) -> None:
        """Note that a block may be the next to go."""
        if self._is_evictable(block):
            if len(self._leaves) > _MAX_STALE * (len(self._by_id) + 16):
                self._leaves = [one for one in self._leaves if one[0] == one[2].priority]
                heapq.heapify(self._leaves)
            self._pushed += 1
            heapq.heappush(self._leaves, (block.priority, self._pushed, block))

    def _evict(self, keep: frozenset[int] = frozenset()) -> bool:
        """Drop the block that is worth least; returns whether there was one.

        Args:
            keep: Numbers of blocks that have to stay.
        """
        spared: list[tuple[float, int, Block]] = []
        victim = None
        while self._leaves and victim is None:
            entry = heapq.heappop(self._leaves)
            priority, _, block = entry
            is_current = self._by_id.get(block.block_id) is block and priority == block.priority
            if not is_current or not self._is_evictable(block):
                continue
            if block.block_id in keep:
                spared.append(entry)
                continue
            victim = block
        for entry in spared:
            heapq.heappush(self._leaves, entry)
        if victim is None:
            return False
        self._clock = max(self._clock, victim.priority)
        self._drop(victim)
        self.evictions += 1
        return True

    def _make_room(self, nbytes: int, *, after: Block | None, besides: Block | None = None) -> bool:
        """Whether a block of so many bytes fits, after others went for it.

        Args:
            nbytes: What it will take.
            after: The block that it follows, which has to stay.
            besides: A block in memory whose place it takes.
        """
        freed = besides.nbytes if besides is not None and besides.is_in_memory else 0
        if nbytes > self._limit_bytes:
            return False
        keep = frozenset(
            one.block_id for one in (after, besides) if one is not None and not one.is_root
        )
        while self.bytes + nbytes - freed > self._limit_bytes:
            if not self._evict(keep):
                return False
        max_entries = self._limits.max_entries
        is_new_entry = after is None or after.is_root or bool(after.memory_children)
        while max_entries is not None and is_new_entry and self.entries >= max_entries:
            if not self._evict(keep):
                return False
        return True

    def _trim(self) -> None:
        """Keep no more than the limits allow, as soon as rows let go of it."""
        max_entries = self._limits.max_entries
        while self.bytes > self._limit_bytes or (
            max_entries is not None and self.entries > max_entries
        ):
            if not self._evict():
                return

    def _look_at_memory(self) -> None:
        self._limit_bytes = self._limits.memory_bytes(self.bytes, self._available_bytes)
        self._trim()

    def _worth(self, block: Block) -> float:
        """What computing it again would cost for each of its bytes, times its uses and one."""
        tokens = float(len(block.token_ids))
        if self._costs.is_stateful:
            # A row begins where state is; without it a block only leads to one that has it.
            tokens = float(block.stop) if block.has_state else 0.0
        cost = tokens * (1 + block.start / _ATTENTION_TOKENS)
        return (1 + block.uses) * cost / max(block.nbytes, 1)

    def _save(self, block: Block) -> None:
        """Have the second tier keep a block, once what comes before it is kept there."""
        parent = block.parent
        if self._limits.disk_bytes is None or block.is_saved or not block.is_held:
            return
        if parent is None or not (parent.is_root or parent.is_saved):
            return
        if not self._make_disk_room(block.nbytes, keep=parent):
            return
        block.is_saved = True
        self.saved_bytes += block.nbytes
        self.saved_count += 1
        self.changes.append(SaveBlock(block.block_id, self._saved(block)))
        for child in block.children.values():
            self._save(child)

    def _saved(self, block: Block) -> SavedBlock:
        assert block.parent is not None, "a root is not kept"
        return SavedBlock(
            digest=block.digest,
            parent=block.parent.digest,
            start=block.start,
            token_ids=block.token_ids,
            has_state=block.has_state,
            nbytes=block.nbytes,
        )

    def _forget_saved(self, block: Block) -> None:
        if block.is_saved:
            block.is_saved = False
            self.saved_bytes -= block.nbytes
            self.saved_count -= 1
            self.changes.append(ForgetSaved((block.digest,)))

    def _make_disk_room(self, nbytes: int, *, keep: Block | None = None) -> bool:
        """Whether so many bytes more fit into the second tier, after others went for it."""
        disk_bytes = self._limits.disk_bytes
        if disk_bytes is None or self.saved_bytes + nbytes <= disk_bytes:
            return True
        if nbytes > disk_bytes:
            return False
        # Rare and in one go: a tenth of the tier is freed at once.
        leaves = sorted(
            (one for one in self.tree if one.is_saved and one is not keep),
            key=lambda one: (one.priority, -one.start),
        )
        goal = disk_bytes - nbytes - disk_bytes // 10
        for block in leaves:
            if self.saved_bytes <= max(goal, 0):
                break
            self._leave_disk(block, keep)
        return self.saved_bytes + nbytes <= disk_bytes

    def _leave_disk(self, block: Block, keep: Block | None) -> None:
        """Forget a saved block unless one after it is saved, which would be of no use then."""
        if not block.is_saved or block.pins or block.is_pending:
            return
        if any(one.is_saved for one in block.children.values()) or block is keep:
            return
        self._forget_saved(block)
        if not block.is_in_memory:
            self._remove(block)
