"""Eviction order of blocks: GreedyDual-Size-Frequency (Cherkasova, 1998).

A block's priority is the priority of the last victim plus cost to compute x uses / bytes. So unused
blocks sink, often used ones sink slower. Only unpinned leaf blocks are evicted, so a prefix outlives
the texts that begin with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from machd.scheduler.block_tree import Block
from machd.scheduler.prefix_limits import BlockCosts

_MAX_USES = 32
"""Cap of counted uses, so that a block once popular is evicted some day."""

_ATTENTION_TOKENS = 8192
"""From this position on a token costs about twice as much to compute as the first one."""

_MIN_SWEPT_ENTRIES = 64
"""Entries of the heap before stale ones are swept."""


class EvictionOrder:
    """Evictable blocks by priority, in a heap whose stale entries are skipped."""

    def __init__(self, costs: BlockCosts) -> None:
        """Start without blocks."""
        self._costs = costs
        self._clock = 0.0
        self._pushed = 0
        self._max_entries = _MIN_SWEPT_ENTRIES
        self._heap: list[tuple[float, int, Block]] = []

    def begin(self, block: Block) -> None:
        """Set the priority of a block that enters memory."""
        block.priority = max(block.priority, self._clock + self._worth(block))

    def use(self, block: Block) -> None:
        """Count a prompt that begins with a block."""
        block.uses = min(block.uses + 1, _MAX_USES)
        block.priority = self._clock + self._worth(block)
        self.offer(block)

    def offer(self, block: Block) -> None:
        """Add a block to the heap if it is evictable."""
        if not block.is_evictable:
            return
        self._pushed += 1
        heapq.heappush(self._heap, (block.priority, self._pushed, block))
        if len(self._heap) > self._max_entries:
            current = {id(one[2]): one for one in self._heap if _holds(one)}
            self._heap = list(current.values())
            heapq.heapify(self._heap)
            self._max_entries = max(_MIN_SWEPT_ENTRIES, 2 * len(self._heap))

    def take(self, keep: Collection[Block] = ()) -> Block | None:
        """Remove and return the evictable block of lowest priority; None if there is none.

        Args:
            keep: Blocks to spare.
        """
        spared: list[tuple[float, int, Block]] = []
        victim = None
        while self._heap and victim is None:
            entry = heapq.heappop(self._heap)
            if not _holds(entry):
                continue
            if entry[2] in keep:
                spared.append(entry)
            else:
                victim = entry[2]
        for entry in spared:
            heapq.heappush(self._heap, entry)
        if victim is not None:
            self._clock = max(self._clock, victim.priority)
        return victim

    def _worth(self, block: Block) -> float:
        """Cost to recompute the block, per byte, times uses + 1."""
        tokens = float(len(block.token_ids))
        if self._costs.is_stateful:
            # A row begins only at a snapshot of state; a block without one merely leads to it.
            tokens = float(block.stop) if block.has_state else 0.0
        cost = tokens * (1 + block.start / _ATTENTION_TOKENS)
        return (1 + block.uses) * cost / max(block.nbytes, 1)


def _holds(entry: tuple[float, int, Block]) -> bool:
    priority, _, block = entry
    return block.is_evictable and block.priority == priority
