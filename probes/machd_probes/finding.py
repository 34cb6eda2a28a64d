"""What a check answers; the prober adds its name and the time it took."""

from __future__ import annotations

from dataclasses import dataclass, field

from machd.capabilities.evidence import Evidence, Outcome


@dataclass(frozen=True, slots=True)
class Finding:
    """An outcome, a sentence where it is not a pass, and the figures."""

    outcome: Outcome
    detail: str = ""
    evidence: Evidence = field(default_factory=Evidence)


def unsupported(detail: str) -> Finding:
    """What the check would try does not exist for this model."""
    return Finding(Outcome.UNSUPPORTED, detail)


def no_data(detail: str) -> Finding:
    """Nothing that the check saw could have told right from wrong."""
    return Finding(Outcome.NO_DATA, detail)
