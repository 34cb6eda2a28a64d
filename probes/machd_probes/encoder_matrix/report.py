"""The encoders' matrix as data; ``machd check --all-archs --json`` writes it under ``encoders`` as it stands here.

::

    {"versions": {"machd", "mlx", "mlx_lm", "mlx_vlm", "backend", "dtype", "blas"},
     "rows": [row…],
     "summary": {"supported", "blocked", "unknown"},
     "complete": true}

The summary counts verdicts on batches. Rows are in the order of the catalogue, family by family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import UNSET, Struct, UnsetType, field

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.matrix import ArchitectureReport
from machd.capabilities.verdict import Support
from machd_probes.encoder_matrix.catalogue import (
    BATCH_CHECK,
    KERNELS_CHECK,
    POOLING_CHECK,
    encoder_families,
    encoders_of,
    family_of,
)
from machd_probes.encoder_matrix.tiny_encoders import TINY_ENCODERS
from machd_probes.report import MatrixVersions, SupportCounts
from machd_probes.versions import ProbeBasis

_SUPPORT = {Outcome.PASSED: Support.SUPPORTED, Outcome.FAILED: Support.BLOCKED}


class EncoderVersions(MatrixVersions, frozen=True, kw_only=True):
    """The versions and the machine that the matrix was measured on; mlx-vlm's is null where it is not installed."""

    mlx_vlm: str | None


class Likeness(Struct, frozen=True, kw_only=True):
    """The verdict on vectors or logits that ought to be equal.

    Attributes:
        texts: How many were compared.
        least_cosine: Of two vectors of one text; left out for a classifier.
        max_logit_diff: The largest difference of two logits of one text; left out for an embedder.
    """

    support: Support = field(name="verdict")
    reason: str
    texts: int = 0
    least_cosine: float | UnsetType = UNSET
    max_logit_diff: float | UnsetType = UNSET


class EncoderRow(Struct, frozen=True, kw_only=True):
    """One tiny encoder.

    Attributes:
        encoder: Its name in the catalogue.
        family: Its ``model_type``.
        task: ``embed`` or ``classify``.
        pooling: As its files name it; null for a classifier.
        batch: Whether a text has the same vector or logits beside others as alone.
        pooled: Whether vectors are pooled, go through dense layers and are normalised as the files say; null for a classifier.
        kernels: Whether machd's own kernels give what mlx's layers give; null where there are none for it.
        problem: What broke the run off.
    """

    encoder: str
    family: str
    task: str
    pooling: str | None
    batch: Likeness
    pooled: Likeness | None = None
    kernels: Likeness | None = None
    problem: str | UnsetType = UNSET

    @property
    def verdicts(self) -> Iterator[tuple[str, Likeness]]:
        """The verdicts that there are, with their names in tables."""
        named = {"batch": self.batch, "pooling": self.pooled, "kernels": self.kernels}
        return ((name, one) for name, one in named.items() if one is not None)

    @property
    def is_wrong(self) -> bool:
        """True if anything was measured to differ: a daemon serves the family all the same."""
        return any(one.support is Support.BLOCKED for _, one in self.verdicts)


class EncoderMatrix(Struct, frozen=True, kw_only=True):
    """The rows of the encoders that were asked for.

    Attributes:
        complete: Whether each of them has a row.
    """

    versions: EncoderVersions
    rows: list[EncoderRow]
    summary: SupportCounts
    complete: bool = True


def encoder_matrix_of(
    reports: Iterable[ArchitectureReport],
    basis: ProbeBasis,
    mlx_vlm: str | None,
    *,
    complete: bool = True,
) -> EncoderMatrix:
    """Judge what was measured.

    Args:
        reports: One for each encoder, in any order.
        basis: What they hold for.
        mlx_vlm: The version of mlx-vlm; None where it is not installed.
        complete: Whether they are all that was asked for.
    """
    by_name = {one.architecture: one for one in reports}
    names = [name for family in encoder_families() for name in encoders_of(family)]
    rows = [_row(by_name[name]) for name in names if name in by_name]
    return EncoderMatrix(
        versions=EncoderVersions.of(basis, mlx_vlm=mlx_vlm),
        rows=rows,
        summary=SupportCounts.of(row.batch.support for row in rows),
        complete=complete,
    )


def _row(report: ArchitectureReport) -> EncoderRow:
    name, results = report.architecture, {one.probe: one for one in report.results}
    pooling = TINY_ENCODERS[name].pooling
    batch = _likeness(results.get(BATCH_CHECK))
    if batch is None:
        batch = Likeness(support=Support.UNKNOWN, reason=report.problem or "nothing was measured")
    return EncoderRow(
        encoder=name,
        family=family_of(name),
        task="embed" if pooling else "classify",
        pooling=pooling or None,
        batch=batch,
        pooled=_likeness(results.get(POOLING_CHECK)),
        kernels=_likeness(results.get(KERNELS_CHECK)),
        problem=report.problem or UNSET,
    )


def _likeness(result: ProbeResult | None) -> Likeness | None:
    if result is None or result.outcome is Outcome.UNSUPPORTED:
        return None
    evidence = result.evidence
    gap, diff = evidence.max_cosine_gap, evidence.max_logit_diff
    parts = [result.detail] if result.detail else []
    if not isinstance(gap, UnsetType):
        parts.append(f"the least cosine of {evidence.cases} is {cosine_words(gap)}")
    if not isinstance(diff, UnsetType):
        parts.append(f"logits of {evidence.cases} texts differ by at most {diff:.1e}")
    return Likeness(
        support=_SUPPORT.get(result.outcome, Support.UNKNOWN),
        reason="; ".join(parts) or str(result.outcome),
        texts=evidence.cases,
        least_cosine=UNSET if isinstance(gap, UnsetType) else 1 - min(gap, 2.0),
        max_logit_diff=diff,
    )


def cosine_words(gap: float) -> str:
    """Write a cosine that is 1 less a small number, of which a decimal would show the nines."""
    return f"1 - {gap:.1e}" if gap < 0.1 else f"{1 - min(gap, 2.0):.2f}"
