"""Why sequences wait for a slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class WaitReason(StrEnum):
    """What a waiting request needs before it runs."""

    MODEL = "model"
    """Its model: it is being loaded, waits for memory, or its engine process is being replaced."""

    SLOT = "slot"
    """A slot: as many sequences run as may run together."""

    MEMORY = "memory"
    """Memory: the KV budget has no room for its reservation, or fewer sequences run since memory ran out."""

    ADAPTER = "adapter"
    """Its adapter: it is being loaded, or those in memory are all in use."""

    TURN = "turn"
    """Its turn: one before it waits for memory, others are awaited for a batch, or the scheduler config changes."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Why each sequence waits at one moment.

    Attributes:
        reason: Of all that have no other one.
        others: Other reasons, by the id of the sequence's subscriber. Of sequences that were suspended every one is here.
    """

    reason: WaitReason = WaitReason.TURN
    others: Mapping[str, WaitReason] = field(default_factory=dict)

    def of(self, sequence_ids: Iterable[str]) -> WaitReason:
        """Return the reason of the first of a request's sequences that has one of its own, or that of all."""
        own = (self.others[one] for one in sequence_ids if one in self.others)
        return next(own, self.reason)
