"""A verdict, and what measuring may do to it.

A rule answers from facts. What was measured overrides it in one direction only: it may turn unknown
into an answer and supported into blocked. What a rule blocks stays blocked until the rule changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult


class Support(StrEnum):
    """Support of a feature by a model."""

    SUPPORTED = "supported"
    BLOCKED = "blocked"
    UNKNOWN = "unknown"


class Source(StrEnum):
    """Source of a verdict."""

    RULE = "rule"
    """Facts of the caches, and a predicate over them."""

    MEASURED = "measured"
    """Probes that ran the model."""


class Verdict(Struct, frozen=True):
    """The verdict on a feature with this model, and its reason, in words that tell an operator what to do.

    Attributes:
        source: Whether facts and a rule say so, or a measurement.
        evidence: The measurement; left out without one.
    """

    support: Support = field(name="verdict")
    reason: str
    source: Source = Source.RULE
    evidence: Evidence | UnsetType = UNSET


AnyVerdict = TypeVar("AnyVerdict", bound=Verdict)


def measured(
    rule: AnyVerdict, results: Sequence[ProbeResult], *, consequence: str = ""
) -> AnyVerdict:
    """Combine a rule's verdict with the results of the probes that the feature depends on.

    One that failed blocks. Without any, those that passed support, unless one ended in an error:
    what crashed may have been the case that matters. All else says nothing.

    ``consequence`` is what happens where the feature is blocked; it ends the reason.
    """
    assert rule.source is Source.RULE, "evidence is weighed against the rule, all of it at once"
    if rule.support is Support.BLOCKED:
        return rule
    failed = _ended(results, Outcome.FAILED)
    if failed:
        return _answered(rule, Support.BLOCKED, _failure(failed, consequence), failed)
    passed = _ended(results, Outcome.PASSED)
    if not passed or _ended(results, Outcome.ERRORED):
        return rule
    return _answered(rule, Support.SUPPORTED, _success(passed), passed)


def _ended(results: Sequence[ProbeResult], outcome: Outcome) -> list[ProbeResult]:
    return [result for result in results if result.outcome is outcome]


def _answered(
    rule: AnyVerdict, support: Support, reason: str, results: Sequence[ProbeResult]
) -> AnyVerdict:
    evidence = Evidence.together(result.evidence for result in results)
    return replace(rule, support=support, reason=reason, source=Source.MEASURED, evidence=evidence)


def _failure(failed: Sequence[ProbeResult], consequence: str) -> str:
    found = "; ".join(f"{one.probe} failed: {one.detail or _figures([one])}" for one in failed)
    found = f"measured on {_subjects(failed)}: {found}"
    return f"{found}; {consequence}" if consequence else found


def _success(passed: Sequence[ProbeResult]) -> str:
    names = ", ".join(dict.fromkeys(one.probe for one in passed))
    return f"measured on {_subjects(passed)}: {names} passed, {_figures(passed)}"


def _subjects(results: Sequence[ProbeResult]) -> str:
    return " and ".join(dict.fromkeys(one.measured_on.value for one in results))


def _figures(results: Sequence[ProbeResult]) -> str:
    together = Evidence.together(result.evidence for result in results)
    return (
        f"{together.token_mismatches} tokens differ in {together.cases} cases, log-probabilities "
        f"by at most {together.max_logprob_diff:.2g} nats (noise {together.noise_floor:.2g})"
    )
