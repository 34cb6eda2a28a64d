"""The proposer in force with its reason, and the limits of drafts.

A pure function, called wherever the proposer is used or shown, so that the log, ``/v1/capabilities`` and
the admin API cannot disagree with the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from machd.capabilities.verdict import Support
from machd.capabilities.verdicts import ModelVerdicts
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.step import ProposerKind
from machd.scheduler.config import NO_DRAFTS, DraftPolicy
from machd.settings.speculation import RequestedSpeculation, SpeculationSettings

_AUTO = "auto"
_SWITCHED_OFF = "speculation.mode is off"
_NOBODY = "nothing is drafted for this model"


@dataclass(frozen=True, slots=True)
class SpeculationDecision:
    """Speculation in a running daemon.

    Attributes:
        requested: What the settings ask for, ``speculation.mode``.
        active: The proposer in force.
        reason: Why it is that one, or none.
        max_draft_tokens: The most draft tokens of a row in a step; 0 without a proposer.
    """

    requested: RequestedSpeculation
    active: ProposerKind
    reason: str
    max_draft_tokens: int

    @property
    def is_as_requested(self) -> bool:
        """Return whether the requested mode is in force; ``auto`` leaves the choice to machd."""
        return self.requested in (_AUTO, self.active.value)


def decide_speculation(
    section: SpeculationSettings, model: ModelDescription, verdicts: ModelVerdicts
) -> SpeculationDecision:
    """Return the scheduler's part of ``speculation``, with its reason."""
    policy = draft_policy(section, model, verdicts)
    if policy.max_draft_tokens:
        reason = model.proposer_reason or f"speculation.mode is {section.mode}"
        return SpeculationDecision(section.mode, model.proposer, reason, policy.max_draft_tokens)
    if model.proposer is not ProposerKind.OFF:
        reason = verdicts.speculation.reason
    else:
        reason = model.proposer_reason or (_SWITCHED_OFF if section.mode == "off" else _NOBODY)
    return SpeculationDecision(section.mode, ProposerKind.OFF, reason, 0)


def draft_policy(
    section: SpeculationSettings, model: ModelDescription, verdicts: ModelVerdicts
) -> DraftPolicy:
    """Allow drafts for one row if there is a proposer and the model is known to roll back.

    Allow them for several rows only if that is known for several rows, too.
    """
    is_right = verdicts.speculation.support is Support.SUPPORTED
    if model.proposer is ProposerKind.OFF or not is_right:
        return NO_DRAFTS
    is_batched = verdicts.batched_specdec.support is Support.SUPPORTED
    return DraftPolicy(section.max_draft_tokens, is_batched=is_batched)
