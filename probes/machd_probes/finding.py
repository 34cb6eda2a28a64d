"""The result of a check, to which the prober adds the check's name and duration."""

from __future__ import annotations

from dataclasses import dataclass

from machd.capabilities.evidence import NO_EVIDENCE, Evidence, Outcome


@dataclass(frozen=True, slots=True)
class Finding:
    """An outcome, a sentence where it is not a pass, and the figures."""

    outcome: Outcome
    detail: str = ""
    evidence: Evidence = NO_EVIDENCE


def unsupported(detail: str) -> Finding:
    """Make the finding for a model that lacks the feature that a check tries."""
    return Finding(Outcome.UNSUPPORTED, detail)


def no_data(detail: str) -> Finding:
    """Make the finding for a check that saw nothing to tell right from wrong by."""
    return Finding(Outcome.NO_DATA, detail)
