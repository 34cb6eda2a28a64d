"""The decode mode: the requested one, the one that the model allows, and the one in force.

A pure function, called wherever the mode is used or shown, so that the scheduler, the log and
``/v1/capabilities`` cannot disagree.
"""

from __future__ import annotations

from msgspec import Struct

from machd.capabilities.verdict import Support, Verdict
from machd.scheduler.events import DecodeMode


class DecodeModeDecision(Struct, frozen=True):
    """The decode mode: as asked for, as it runs, and the reason.

    Attributes:
        requested: What the settings ask for.
        active: The mode in force.
        reason: Why the settings lead to it with this model.
    """

    requested: DecodeMode
    active: DecodeMode
    reason: str

    @property
    def is_as_requested(self) -> bool:
        """Return whether the mode in force is the requested one."""
        return self.requested is self.active


def decide_decode_mode(*, is_batching_asked: bool, verdict: Verdict) -> DecodeModeDecision:
    """Batched only where it was asked for and is known to be right; otherwise single."""
    if not is_batching_asked:
        return DecodeModeDecision(
            DecodeMode.SINGLE,
            DecodeMode.SINGLE,
            "continuous_batching.enabled is false, so requests are answered one at a time",
        )
    active = DecodeMode.BATCHED if verdict.support is Support.SUPPORTED else DecodeMode.SINGLE
    return DecodeModeDecision(DecodeMode.BATCHED, active, verdict.reason)
