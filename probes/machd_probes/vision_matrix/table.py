"""The vision matrix as a person reads it: a table and a few lines, at 80 columns and in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from machd.capabilities.evidence import Evidence
from machd_probes.table import NONE, STYLES, mark
from machd_probes.vision_matrix.report import (
    FamilyRow,
    VisionMatrix,
    VisionSummary,
    by_text_only_reason,
    unsupported_features,
)

_COLUMNS = (
    ("\nimages", 6),
    ("\nbatch", 5),
    ("prefix\ncache", 6),
    ("\nvideo", 5),
    ("\nrows", 4),
    ("tokens\nwrong", 6),
    ("\nnats", 5),
)
_FIGURES = 3
"""Columns at the end that are numbers."""


def print_vision_matrix(matrix: VisionMatrix, console: Console) -> None:
    """Write the table, what stands behind every verdict but "supported", and the counts."""
    served = [row for row in matrix.families if row.served]
    if served:
        console.print(Text(f"families that take images ({len(served)})", style="bold"))
        console.print(_table(served))
        console.print()
    for row, feature, verdict in unsupported_features(matrix.families):
        _print_reason(console, f"{row.family}, {feature}: {verdict.support}", verdict.reason)
    for reason, families in by_text_only_reason(matrix.families):
        _print_reason(console, f"text only: {', '.join(families)}", reason)
    console.print(Text("\n".join(_summary_lines(matrix))))


def _print_reason(console: Console, heading: str, reason: str) -> None:
    console.print(Text(heading, style="bold"))
    console.print(Padding(Text(reason), (0, 0, 0, 2)))
    console.print()


def _table(rows: Sequence[FamilyRow]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    width = max(len(row.family) for row in rows)
    table.add_column("\nfamily", min_width=max(width, 12), no_wrap=True)
    for number, (heading, least_width) in enumerate(_COLUMNS):
        is_figure = number >= len(_COLUMNS) - _FIGURES
        table.add_column(
            heading,
            min_width=least_width,
            no_wrap=True,
            justify="right" if is_figure else "left",
        )
    for row in rows:
        cells = (
            mark(row.images),
            mark(row.continuous_batching),
            mark(row.prefix_cache),
            mark(row.video),
            *figures(row),
        )
        table.add_row(Text(row.family), *(Text(cell, STYLES.get(cell, "")) for cell in cells))
    return table


def figures(row: FamilyRow) -> tuple[str, str, str]:
    """Rows compared, tokens that differ, and the largest difference, of all checks together."""
    measured = [one.evidence for one in row.probes if isinstance(one.evidence, Evidence)]
    if not measured:
        return NONE, NONE, NONE
    return (
        str(sum(one.cases for one in measured)),
        str(sum(one.token_mismatches for one in measured)),
        f"{max(one.max_logprob_diff for one in measured):.0e}",
    )


def measured_on(matrix: VisionMatrix) -> str:
    """Versions and what computed, in one line."""
    versions = matrix.versions
    parts = (
        f"machd {versions.machd}",
        f"mlx {versions.mlx}",
        f"mlx-lm {versions.mlx_lm}",
        f"mlx-vlm {versions.mlx_vlm}",
        versions.backend,
        versions.blas,
        versions.dtype,
    )
    return ", ".join(part for part in parts if part)


def _summary_lines(matrix: VisionMatrix) -> Iterator[str]:
    yield measured_on(matrix)
    count = len(matrix.families)
    yield f"{count} {'family' if count == 1 else 'families'}: {counts(matrix.summary)}"
    if not matrix.complete:
        yield "incomplete: interrupted before every family was probed"


def counts(summary: VisionSummary) -> str:
    """Counts of verdicts in words."""
    return (
        f"{summary.supported} answer as mlx-vlm does, {summary.blocked} do not, "
        f"{summary.unknown} unknown, {summary.text_only} take text only"
    )
