"""Whether and how far tokens are guessed ahead: what was asked for, and what the model allows.

Pure, and asked again wherever the answer is shown.
"""

from __future__ import annotations

from machd.capabilities.verdict import Support
from machd.capabilities.verdicts import ModelVerdicts
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.step import ProposerKind
from machd.scheduler.config import NO_DRAFTS, DraftPolicy
from machd.settings.speculation import SpeculationSettings


def draft_policy(
    section: SpeculationSettings, model: ModelDescription, verdicts: ModelVerdicts
) -> DraftPolicy:
    """Guesses for one row where somebody guesses and the model is known to take wrong ones back.

    Beside others only where that is known of several rows, too.
    """
    is_right = verdicts.speculation.support is Support.SUPPORTED
    if model.proposer is ProposerKind.OFF or not is_right:
        return NO_DRAFTS
    is_batched = verdicts.batched_specdec.support is Support.SUPPORTED
    return DraftPolicy(section.max_draft_tokens, is_batched=is_batched)
