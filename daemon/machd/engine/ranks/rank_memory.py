"""The memory of every rank."""

from __future__ import annotations

from dataclasses import dataclass

from machd.engine.protocol.memory import MemoryReading
from machd.engine.ranks.rank_group import RankGroup

_UNKNOWN_BYTES = 1 << 62
"""For a rank that cannot tell what is left: no other rank waits for it."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's memory; see :class:`MemoryReading`."""

    active_bytes: int
    available_bytes: int
    step_bytes: int


def gathered_memory(group: RankGroup, reading: MemoryReading) -> list[RankMemory]:
    """Return the memory of every rank, by rank. A collective."""
    own = (reading.available_bytes, reading.step_bytes)
    left = [_UNKNOWN_BYTES if one is None else one for one in own]
    return [RankMemory(*one) for one in group.gather([reading.active_bytes, *left])]
