"""The matrix as data; ``machd check --all-archs --json`` writes it as it stands here.

::

    {"versions": {"machd", "mlx", "mlx_lm", "backend", "dtype", "blas"},
     "architectures": [row…],
     "summary": {"supported", "blocked", "unknown"},
     "complete": true}

A row is what ``/v1/capabilities`` says of a model, and ``"probes": [{"probe", "outcome",
"detail", "evidence", "duration_s"}]``, and ``"problem"`` where there was nothing to judge. What is
empty is left out. The summary counts verdicts on continuous batching. Rows are sorted by name.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Self, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from machd.capabilities.bitwise import BitwiseVerdict, Computing, judge_bitwise
from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport
from machd.capabilities.verdict import Support, Verdict
from machd.capabilities.verdicts import judge
from machd.capabilities.versions import Versions
from machd.served.capabilities import ModelCapabilities, wire_capabilities
from machd_probes.versions import ProbeBasis

MLX_LM_PROBE = "mlx_lm_batch"
"""The probe of mlx-lm's own batch path, which machd does not use: a finding, never our error."""

_DIGITS = 2

AnyFigure = TypeVar("AnyFigure", float, float | UnsetType)


class MatrixVersions(Versions, frozen=True, kw_only=True):
    """The versions and the machine that the matrix was measured on.

    Attributes:
        blas: The library that multiplies matrices on the CPU; null elsewhere.
    """

    blas: str | None = None

    @classmethod
    def of(cls, basis: ProbeBasis, **others: str | None) -> Self:
        """Return the versions that results of a basis hold for, with those that only one matrix has."""
        fields: dict[str, Any] = {**_fields(basis.versions), "blas": basis.blas, **others}
        return cls(**fields)


class ProbeRow(Struct, frozen=True, kw_only=True):
    """The result of one probe on one architecture; fields as of ``ProbeResult``."""

    probe: str
    outcome: Outcome
    detail: str | UnsetType = UNSET
    evidence: Evidence | UnsetType = UNSET
    duration_s: float | UnsetType = UNSET


class MatrixRow(ModelCapabilities, frozen=True, kw_only=True):
    """One architecture.

    Attributes:
        probes: Results, in the order of the catalogue.
        problem: Why there was nothing to judge, or what broke the run off.
    """

    probes: tuple[ProbeRow, ...] = ()
    problem: str | UnsetType = UNSET

    @property
    def errors(self) -> Iterator[ProbeRow]:
        """Probes that raised, crashed or took too long."""
        return (
            probe
            for probe in self.probes
            if probe.outcome is Outcome.ERRORED and probe.probe != MLX_LM_PROBE
        )


class SupportCounts(Struct, frozen=True, kw_only=True):
    """Counts of a matrix's rows by the verdict that its summary is about."""

    supported: int
    blocked: int
    unknown: int

    @classmethod
    def of(cls, verdicts: Iterable[Support], **others: int) -> Self:
        """Count verdicts; ``others`` are counts that only one matrix has."""
        counts = Counter(verdicts)
        return cls(**{one.value: counts[one] for one in Support}, **others)


class MatrixReport(Struct, frozen=True, kw_only=True):
    """The whole matrix, or the rows that were asked for.

    Attributes:
        complete: Whether every architecture that was asked for has a row.
    """

    versions: MatrixVersions
    architectures: list[MatrixRow]
    summary: SupportCounts
    complete: bool = True


def matrix_of(
    reports: Iterable[ArchitectureReport], basis: ProbeBasis, *, complete: bool = True
) -> MatrixReport:
    """Judge what was measured.

    Args:
        reports: One for each architecture, in any order.
        basis: What they hold for.
        complete: Whether they are all that was asked for.
    """
    ordered = sorted(reports, key=lambda one: (one.architecture.lower(), one.architecture))
    rows = [_row(report, basis) for report in ordered]
    return MatrixReport(
        versions=MatrixVersions.of(basis),
        architectures=rows,
        summary=SupportCounts.of(
            verdict.support for row in rows if (verdict := row.continuous_batching)
        ),
        complete=complete,
    )


def rounded(report: ArchitectureReport) -> ArchitectureReport:
    """With figures of two digits and without durations, so that reruns rarely differ."""
    configurations = tuple(
        dataclasses.replace(one, results=tuple(map(_rounded, one.results)))
        for one in report.configurations
    )
    return dataclasses.replace(
        report, results=tuple(map(_rounded, report.results)), configurations=configurations
    )


def encode_matrix(matrix: MatrixReport) -> bytes:
    """JSON for people and programs, its last line ended."""
    return msgspec.json.format(msgspec.json.encode(matrix), indent=2) + b"\n"


def _row(report: ArchitectureReport, basis: ProbeBasis) -> MatrixRow:
    return MatrixRow(
        **_fields(_capabilities(report, basis)),
        probes=tuple(probe_row(result) for result in report.results),
        problem=report.problem or UNSET,
    )


def _capabilities(report: ArchitectureReport, basis: ProbeBasis) -> ModelCapabilities:
    name, versions = report.architecture, basis.versions
    if report.facts is not None:
        verdicts = judge(report.facts, report.results)
        computing = Computing(basis.backend, basis.blas, is_native=True)
        bitwise = judge_bitwise(report.results, computing)
        return wire_capabilities(name, report.facts, verdicts, versions, bitwise=bitwise)
    reason = report.problem or "nothing was measured"
    return ModelCapabilities(
        architecture=name,
        continuous_batching=Verdict(Support.UNKNOWN, reason),
        bitwise=BitwiseVerdict(value=False, reason=reason),
        versions=versions,
    )


def probe_row(result: ProbeResult) -> ProbeRow:
    """Return a result as a row has it."""
    return ProbeRow(
        probe=result.probe,
        outcome=result.outcome,
        detail=result.detail or UNSET,
        evidence=result.evidence if result.evidence.cases else UNSET,
        duration_s=round(result.duration_s, 3) or UNSET,
    )


def _rounded(result: ProbeResult) -> ProbeResult:
    evidence = msgspec.structs.replace(
        result.evidence,
        max_logprob_diff=_two_digits(result.evidence.max_logprob_diff),
        noise_floor=_two_digits(result.evidence.noise_floor),
        max_cosine_gap=_two_digits(result.evidence.max_cosine_gap),
        max_logit_diff=_two_digits(result.evidence.max_logit_diff),
    )
    return dataclasses.replace(result, evidence=evidence, duration_s=0.0)


def _two_digits(value: AnyFigure) -> AnyFigure:
    return value if isinstance(value, UnsetType) else float(f"{value:.{_DIGITS}g}")


def _fields(struct: Struct) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}
