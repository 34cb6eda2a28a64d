"""Evidence of probes, as plain data: outcomes, and the figures behind a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import force_setattr

FURTHEST_NATS = 1e9
"""Stands for differences that are infinite or no number: JSON has no word for them."""


class Outcome(StrEnum):
    """Outcome of a probe."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    """The model lacks the subject of the probe, such as a window for a window overflow."""

    NO_DATA = "no_data"
    """It ran, and nothing it saw could have told right from wrong."""

    ERRORED = "errored"
    """It raised, crashed or took too long."""

    MEASURING = "measuring"
    """It runs beside the daemon; its detail says since when."""


class MeasuredOn(StrEnum):
    """Model that a probe ran, in the words of a verdict's reason."""

    ARCHITECTURE = "a tiny model of the architecture"
    SHIPPED = "a tiny model of the architecture, shipped with machd"
    SHIPPED_OTHER_BLAS = (
        "a tiny model of the architecture, shipped with machd and measured with another BLAS"
    )
    STAND_IN = "a tiny model of the same configuration"
    WEIGHTS = "the model itself"


class Evidence(Struct, frozen=True):
    """Figures that a probe measured.

    Attributes:
        token_mismatches: Greedy tokens that differ from those of the row alone, by more than noise.
        max_logprob_diff: Largest difference of a log-probability, in nats; 1e9 for one that is
            infinite or NaN.
        noise_floor: The same difference between two runs that ought to be equal, in nats.
        cases: Prompts and batch shapes compared; texts of an encoder's.
        max_cosine_gap: Of an encoder's vectors: 1 less the least cosine of two that ought to be equal.
        max_logit_diff: Of a classifier's logits: the largest difference of two that ought to be equal.
    """

    token_mismatches: int
    max_logprob_diff: float
    noise_floor: float
    cases: int
    max_cosine_gap: float | UnsetType = UNSET
    max_logit_diff: float | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Hold figures that can be written down and read back."""
        for name in ("max_logprob_diff", "noise_floor", "max_cosine_gap", "max_logit_diff"):
            value: float | UnsetType = getattr(self, name)
            # So that what is no number is caught too.
            if not isinstance(value, UnsetType) and not value <= FURTHEST_NATS:
                force_setattr(self, name, FURTHEST_NATS)

    @classmethod
    def together(cls, parts: Iterable[Evidence]) -> Evidence:
        """All of them as one: counts add up, of differences the largest stays."""
        every = tuple(parts)
        return cls(
            token_mismatches=sum(one.token_mismatches for one in every),
            max_logprob_diff=max((one.max_logprob_diff for one in every), default=0.0),
            noise_floor=max((one.noise_floor for one in every), default=0.0),
            cases=sum(one.cases for one in every),
            max_cosine_gap=_largest(one.max_cosine_gap for one in every),
            max_logit_diff=_largest(one.max_logit_diff for one in every),
        )


def _largest(figures: Iterable[float | UnsetType]) -> float | UnsetType:
    return max((one for one in figures if not isinstance(one, UnsetType)), default=UNSET)


NO_EVIDENCE = Evidence(0, 0.0, 0.0, cases=0)
"""The figures of a probe that compared nothing."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of one probe with one model.

    Attributes:
        probe: Its name: the file of ``machd_probes/checks`` that it is in.
        detail: What a person should know beyond the figures; empty for most that passed.
        duration_s: What it took.
        measured_on: Which model it ran.
    """

    probe: str
    outcome: Outcome
    detail: str = ""
    evidence: Evidence = NO_EVIDENCE
    duration_s: float = 0.0
    measured_on: MeasuredOn = MeasuredOn.ARCHITECTURE

    @property
    def is_answer(self) -> bool:
        """True if it says something of the model: it passed, or it failed."""
        return self.outcome in {Outcome.PASSED, Outcome.FAILED}

    @classmethod
    def worst(cls, results: Sequence[ProbeResult]) -> ProbeResult:
        """Return the worst result of one probe on several models, with the figures of all."""
        worst = min(results, key=lambda result: _SEVERITY.index(result.outcome))
        return replace(
            worst,
            evidence=Evidence.together(result.evidence for result in results),
            duration_s=sum(result.duration_s for result in results),
        )


Results: TypeAlias = tuple[ProbeResult, ...] | None
"""Results of probes on a model, empty if none has run; None if rules alone are to judge it."""

_SEVERITY = (
    Outcome.ERRORED,
    Outcome.FAILED,
    Outcome.PASSED,
    Outcome.NO_DATA,
    Outcome.UNSUPPORTED,
    Outcome.MEASURING,
)
