"""The vision matrix as data; ``machd check --all-archs --vision --json`` writes it as it stands here.

::

    {"versions": {"machd", "mlx", "mlx_lm", "mlx_vlm", "backend", "dtype", "blas"},
     "families": [row…],
     "summary": {"supported", "blocked", "unknown", "text_only"},
     "complete": true}

The summary counts verdicts on images, of the families that are served with them. Rows are sorted by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from machd.capabilities.batching_rules import continuous_batching
from machd.capabilities.evidence import Outcome, ProbeResult
from machd.capabilities.facts import CacheFacts
from machd.capabilities.matrix import ArchitectureReport
from machd.capabilities.rules import prefix_cache
from machd.capabilities.verdict import Source, Support, Verdict, measured
from machd_probes.report import MatrixVersions, ProbeRow, SupportCounts, probe_row
from machd_probes.versions import ProbeBasis
from machd_probes.vision_matrix.catalogue import (
    BATCHING_CHECKS,
    IMAGE_CHECKS,
    PREFIX_CHECK,
    SERVED,
    VIDEO_CHECK,
    WINDOW_CHECK,
)

_NOT_MEASURED = Verdict(Support.UNKNOWN, "nothing was measured")
_TEXT_ONLY = "the model is served as a text model"


class VisionVersions(MatrixVersions, frozen=True, kw_only=True):
    """The versions and the machine that the matrix was measured on."""

    mlx_vlm: str


class FamilyRow(Struct, frozen=True, kw_only=True):
    """One family.

    Attributes:
        family: mlx-vlm's name of it.
        served: Whether machd serves it with images.
        kv_cache_kind: As of ``machd check``; left out where no model was built.
        images: Whether a prompt with images, alone, gets the tokens of mlx-vlm's own generation.
        continuous_batching: Whether rows with images get them in a batch; null where no image is served.
        prefix_cache: Whether an image that the prefix cache holds gives them; null likewise.
        video: The same as ``images``, of videos; null where none is served.
        probes: Results, in the order of the catalogue.
        problem: What broke the run off.
    """

    family: str
    served: bool
    kv_cache_kind: str | UnsetType = UNSET
    images: Verdict
    continuous_batching: Verdict | None = None
    prefix_cache: Verdict | None = None
    video: Verdict | None = None
    probes: tuple[ProbeRow, ...] = ()
    problem: str | UnsetType = UNSET

    @property
    def is_wrong(self) -> bool:
        """True if machd serves images whose answers were measured not to be mlx-vlm's. What a rule blocks is not served."""
        verdicts = (self.images, self.prefix_cache, self.video)
        return self.served and any(
            one is not None and (one.support, one.source) == (Support.BLOCKED, Source.MEASURED)
            for one in verdicts
        )

    @property
    def is_batched(self) -> bool:
        """True if images are supported, alone and in a batch."""
        verdicts = (self.images, self.continuous_batching)
        return all(one is not None and one.support is Support.SUPPORTED for one in verdicts)


class VisionSummary(SupportCounts, frozen=True, kw_only=True):
    """Counts of the families that are served with images by their verdict on images, and of the others."""

    text_only: int


class VisionMatrix(Struct, frozen=True, kw_only=True):
    """The whole matrix, or the rows that were asked for.

    Attributes:
        complete: Whether every family that was asked for has a row.
    """

    versions: VisionVersions
    families: list[FamilyRow]
    summary: VisionSummary
    complete: bool = True


def vision_matrix_of(
    reports: Iterable[ArchitectureReport],
    basis: ProbeBasis,
    mlx_vlm: str,
    *,
    complete: bool = True,
) -> VisionMatrix:
    """Judge what was measured.

    Args:
        reports: One for each family, in any order.
        basis: What they hold for.
        mlx_vlm: The version of mlx-vlm.
        complete: Whether they are all that was asked for.
    """
    rows = [_row(one) for one in sorted(reports, key=lambda one: one.architecture)]
    return VisionMatrix(
        versions=VisionVersions.of(basis, mlx_vlm=mlx_vlm),
        families=rows,
        summary=VisionSummary.of(
            (row.images.support for row in rows if row.served),
            text_only=sum(not row.served for row in rows),
        ),
        complete=complete,
    )


def encode_vision_matrix(matrix: VisionMatrix) -> bytes:
    """JSON for people and programs, its last line ended."""
    return msgspec.json.format(msgspec.json.encode(matrix), indent=2) + b"\n"


def _row(report: ArchitectureReport) -> FamilyRow:
    by_check = {result.probe: result for result in report.results}
    served = by_check.get(SERVED)
    if served is not None and served.outcome is Outcome.UNSUPPORTED:
        verdict = Verdict(Support.BLOCKED, served.detail or _TEXT_ONLY)
        return FamilyRow(family=report.architecture, served=False, images=verdict)
    facts = report.facts
    if facts is None:
        verdict = replace(_NOT_MEASURED, reason=report.problem or _NOT_MEASURED.reason)
        return FamilyRow(
            family=report.architecture,
            served=True,
            images=verdict,
            problem=report.problem or UNSET,
        )
    results = [one for one in report.results if one.probe != SERVED]
    images = _images(results)
    return FamilyRow(
        family=report.architecture,
        served=True,
        kv_cache_kind=facts.kind.value,
        images=images,
        continuous_batching=_batching(facts, images, results),
        prefix_cache=_prefix(facts, results),
        video=_video(by_check.get(VIDEO_CHECK)),
        probes=tuple(probe_row(one) for one in results),
    )


def _images(results: Sequence[ProbeResult]) -> Verdict:
    return measured(
        _NOT_MEASURED,
        _needed(results, IMAGE_CHECKS),
        consequence="answers about images are not those of mlx-vlm",
    )


def _batching(facts: CacheFacts, images: Verdict, results: Sequence[ProbeResult]) -> Verdict:
    """Judge batching; layers with a window need evidence of rows that are longer than it."""
    if images.support is Support.BLOCKED:
        return images
    names = (*BATCHING_CHECKS, WINDOW_CHECK) if facts.window_tokens else BATCHING_CHECKS
    return measured(
        continuous_batching(facts),
        _needed(results, names),
        consequence="requests are served one at a time",
    )


def _prefix(facts: CacheFacts, results: Sequence[ProbeResult]) -> Verdict:
    return measured(
        prefix_cache(facts),
        _needed(results, (PREFIX_CHECK,)),
        consequence="serve the model without cache.prefix",
    )


def _video(result: ProbeResult | None) -> Verdict | None:
    if result is None or result.outcome is Outcome.UNSUPPORTED:
        return None
    consequence = "answers about videos are not those of mlx-vlm"
    return measured(_NOT_MEASURED, [result], consequence=consequence)


def _needed(results: Sequence[ProbeResult], names: Sequence[str]) -> list[ProbeResult]:
    """Return the results of some checks; passes among them count only if all of them passed."""
    fed = [one for one in results if one.probe in names]
    if len(fed) == len(names) and all(one.outcome is Outcome.PASSED for one in fed):
        return fed
    return [one for one in fed if one.outcome is not Outcome.PASSED]


def by_text_only_reason(rows: Iterable[FamilyRow]) -> list[tuple[str, list[str]]]:
    """Reasons why families take text only, each with its families, the most frequent first."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if not row.served:
            groups.setdefault(row.images.reason, []).append(row.family)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))


def unsupported_features(
    rows: Iterable[FamilyRow],
) -> Iterator[tuple[FamilyRow, str, Verdict]]:
    """Verdicts other than supported on what families that take images can do, with the feature's name."""
    for row in rows:
        verdicts = {
            "images": row.images,
            "continuous batching": row.continuous_batching,
            "prefix cache": row.prefix_cache,
            "video": row.video,
        }
        for name, verdict in verdicts.items():
            if row.served and verdict is not None and verdict.support is not Support.SUPPORTED:
                yield row, name, verdict
