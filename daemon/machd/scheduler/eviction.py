"""Eviction order of blocks: GreedyDual-Size-Frequency (Cherkasova, 1998).

A block's priority is the priority of the last evicted block plus cost to compute x uses / bytes. So blocks age,
and often used ones age more slowly. Only unpinned leaf blocks are evicted, so a prefix outlives
the texts that begin with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator

from machd.scheduler.block_tree import Block
from machd.scheduler.prefix_limits import BlockCosts

_MAX_USES = 32
"""Cap of counted uses, so that a block that was once used often can be evicted."""

_ATTENTION_TOKENS = 8192
"""From this position on a token costs about twice as much to compute as the first one."""

_MIN_SWEPT_ENTRIES = 64
"""Entries of the heap before stale ones are swept."""


class LeafHeap:
    """Evictable leaf blocks of a tier, lowest priority first; outdated entries are skipped."""

    def __init__(
        self, is_evictable: Callable[[Block], bool], *, deepest_first: bool = False
    ) -> None:
        """Start without blocks.

        Args:
            is_evictable: Condition under which a block may be evicted now.
            deepest_first: Order blocks of equal priority by their end; else by when they were offered.
        """
        self._is_evictable = is_evictable
        self._deepest_first = deepest_first
        self._entries: list[tuple[float, int, int, Block]] = []
        self._pushed = 0
        self._max_entries = _MIN_SWEPT_ENTRIES

    def __len__(self) -> int:
        """Count the entries, outdated ones included."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks of all entries."""
        return (entry[3] for entry in self._entries)

    def offer(self, block: Block) -> None:
        """Add a block if it is evictable."""
        if not self._is_evictable(block):
            return
        self._pushed += 1
        depth = -block.stop if self._deepest_first else 0
        heapq.heappush(self._entries, (block.priority, depth, self._pushed, block))
        if len(self._entries) > self._max_entries:
            current = {
                id(one): (one.priority, depth, pushed, one)
                for _, depth, pushed, one in self._entries
                if self._is_evictable(one)
            }
            self._entries = list(current.values())
            heapq.heapify(self._entries)
            self._max_entries = max(_MIN_SWEPT_ENTRIES, 2 * len(self._entries))

    def take(self, keep: Collection[Block] = ()) -> Block | None:
        """Remove and return the evictable block of lowest priority; None if there is none.

        Args:
            keep: Blocks that are not evicted.
        """
        spared: list[tuple[float, int, int, Block]] = []
        victim = None
        while self._entries and victim is None:
            entry = heapq.heappop(self._entries)
            priority, _, _, block = entry
            if not self._is_evictable(block):
                continue
            if priority < block.priority:
                self.offer(block)  # used since it was offered
            elif block in keep:
                spared.append(entry)
            else:
                victim = block
        for entry in spared:
            heapq.heappush(self._entries, entry)
        return victim


class EvictionOrder(LeafHeap):
    """Evictable blocks in memory, with their priorities."""

    def __init__(self, costs: BlockCosts) -> None:
        """Start without blocks."""
        super().__init__(lambda block: block.is_evictable)
        self._costs = costs
        self._clock = 0.0

    def begin(self, block: Block) -> None:
        """Set the priority of a block that enters memory."""
        block.priority = max(block.priority, self._clock + self._worth(block))

    def use(self, block: Block) -> None:
        """Count a prompt that begins with a block."""
        block.uses = min(block.uses + 1, _MAX_USES)
        block.priority = self._clock + self._worth(block)
        self.offer(block)

    def take(self, keep: Collection[Block] = ()) -> Block | None:
        """Remove and return the evictable block of lowest priority; later ones count from there."""
        victim = super().take(keep)
        if victim is not None:
            self._clock = max(self._clock, victim.priority)
        return victim

    def _worth(self, block: Block) -> float:
        """Cost to recompute the block, per byte, times uses + 1."""
        tokens = float(len(block.token_ids))
        if self._costs.is_stateful:
            # A row begins only at a snapshot of state: a block without one saves nothing by itself.
            tokens = float(block.stop) if block.has_state else 0.0
        cost = tokens * (1 + block.start / _ATTENTION_TOKENS)
        return (1 + block.uses) * cost / max(block.nbytes, 1)
