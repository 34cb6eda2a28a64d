"""Agreement of ranks within a step: rank 0's decisions, and the memory of the tightest rank.

Satisfies :class:`machd.engine.step.ports.Ranks` by structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from machd.engine.protocol.step import SettledRow
from machd.engine.ranks.rank_group import RankGroup

T = TypeVar("T")

_encode = msgspec.msgpack.encode
_SLOTS = msgspec.msgpack.Decoder(frozenset[int])
_SPANS = msgspec.msgpack.Decoder(list[tuple[int, ...]])
_SETTLED: msgspec.msgpack.Decoder[list[SettledRow] | None] = msgspec.msgpack.Decoder(
    list[SettledRow] | None
)


class Agreement:
    """Tells the followers on rank 0, and is told on the others."""

    def __init__(self, group: RankGroup) -> None:
        """Agree with the ranks of ``group``."""
        self._group = group

    @property
    def leads(self) -> bool:
        """True on rank 0."""
        return self._group.leads

    def tightest(self, needed_bytes: int, left_bytes: int) -> tuple[int, int]:
        """Return the need, and what is left for it, of the rank that has least to spare."""
        ranks = self._group.gather([needed_bytes, left_bytes])
        needed_bytes, left_bytes = min(ranks, key=lambda rank: rank[1] - rank[0])
        return needed_bytes, left_bytes

    def failed_slots(self, slot_indices: Sequence[int]) -> frozenset[int]:
        """Return the slots of whole prompts whose row could not begin to decode."""
        return self._told(_SLOTS, slot_indices)

    def spans(self, ahead_ids: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the tokens ahead of each row of the next pass; empty for a plain one."""
        return self._told(_SPANS, ahead_ids)

    def settled(self, rows: Sequence[SettledRow] | None) -> list[SettledRow] | None:
        """Return what each row keeps of a pass; None if it is to be computed again without tokens ahead."""
        return self._told(_SETTLED, rows)

    def _told(self, decoder: msgspec.msgpack.Decoder[T], decision: object) -> T:
        return decoder.decode(self._group.tell(_encode(decision) if self.leads else b""))
