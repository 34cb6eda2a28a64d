"""Which block goes next, when some block has to.

It is the one that is worth least of those that no running row needs and that nothing in memory
follows. What a block is worth is as in GreedyDual-Size-Frequency (Cherkasova, 1998): what went last,
plus what it cost to compute for each of its bytes, times how often it was of use. So a block that is
not used sinks, a block often used sinks slower, and a long text is kept for as long as its
beginnings are in use.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from machd.scheduler.block_tree import Block
from machd.scheduler.prefix_limits import BlockCosts

_MAX_USES = 32
"""More do not make a block worth more: what was popular once has to go some day."""

_ATTENTION_TOKENS = 8192
"""From this position on a token costs about twice as much to compute as the first one."""

_MIN_SWEPT_ENTRIES = 64
"""Entries of the heap before those that no longer hold are looked for."""


class EvictionOrder:
    """Blocks by what they are worth. It is told of all that may go, and finds out who still may."""

    def __init__(self, costs: BlockCosts) -> None:
        """Begin with none."""
        self._costs = costs
        self._clock = 0.0
        self._pushed = 0
        self._max_entries = _MIN_SWEPT_ENTRIES
        self._heap: list[tuple[float, int, Block]] = []

    def begin(self, block: Block) -> None:
        """Count a block as come now."""
        block.priority = max(block.priority, self._clock + self._worth(block))

    def use(self, block: Block) -> None:
        """Count that a prompt begins with a block."""
        block.uses = min(block.uses + 1, _MAX_USES)
        block.priority = self._clock + self._worth(block)
        self.offer(block)

    def offer(self, block: Block) -> None:
        """Note that a block may be the next to go, if it may."""
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
        """The block that goes next; None if none may go.

        Args:
            keep: Blocks that have to stay.
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
        """What computing it again would cost for each of its bytes, times its uses and one."""
        tokens = float(len(block.token_ids))
        if self._costs.is_stateful:
            # A row begins where state is; without it a block only leads to one that has it.
            tokens = float(block.stop) if block.has_state else 0.0
        cost = tokens * (1 + block.start / _ATTENTION_TOKENS)
        return (1 + block.uses) * cost / max(block.nbytes, 1)


def _holds(entry: tuple[float, int, Block]) -> bool:
    priority, _, block = entry
    return block.is_evictable and block.priority == priority
