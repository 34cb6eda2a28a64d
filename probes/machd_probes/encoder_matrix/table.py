"""The encoders' matrix as a person reads it: a table and a few lines, at 80 columns and in a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UnsetType
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from machd.capabilities.verdict import Support
from machd_probes.encoder_matrix.report import (
    EncoderMatrix,
    EncoderRow,
    cosine_words,
)
from machd_probes.report import SupportCounts
from machd_probes.table import NONE, STYLES, mark, measured_on

HEADINGS = ("batch", "pooling", "kernels", "texts", "least cosine", "logits off by")
_FIGURES = 3
"""Headings at the end that are of numbers."""


def print_encoders(matrix: EncoderMatrix, console: Console) -> None:
    """Write the table, what stands behind every verdict but "supported", and the counts."""
    console.print(Text(f"encoders ({len(matrix.rows)})", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("encoder", no_wrap=True)
    for number, heading in enumerate(HEADINGS):
        is_figure = number >= len(HEADINGS) - _FIGURES
        table.add_column(heading, no_wrap=True, justify="right" if is_figure else "left")
    for row in matrix.rows:
        table.add_row(Text(row.encoder), *(Text(one, STYLES.get(one, "")) for one in cells(row)))
    console.print(table)
    console.print()
    for name, reason in unsupported(matrix):
        console.print(Text(name, style="bold"))
        console.print(Padding(Text(reason), (0, 0, 0, 2)))
        console.print()
    console.print(Text("\n".join(_summary_lines(matrix))))
    console.print()


def _summary_lines(matrix: EncoderMatrix) -> Iterator[str]:
    yield f"{measured_on(matrix.versions)}, mlx-vlm {matrix.versions.mlx_vlm or NONE}"
    count = len(matrix.rows)
    yield f"{count} {'encoder' if count == 1 else 'encoders'}: {counts(matrix.summary)}"
    if not matrix.complete:
        yield "incomplete: interrupted before every encoder was probed"


def cells(row: EncoderRow) -> tuple[str, ...]:
    """Return verdicts, and the figures of all checks together."""
    found = [one for _, one in row.verdicts]
    cosines = [one.least_cosine for one in found if not isinstance(one.least_cosine, UnsetType)]
    diffs = [one.max_logit_diff for one in found if not isinstance(one.max_logit_diff, UnsetType)]
    texts = sum(one.texts for one in found)
    return (
        mark(row.batch),
        mark(row.pooled),
        mark(row.kernels),
        str(texts) if texts else NONE,
        cosine_words(1 - min(cosines)) if cosines else NONE,
        f"{max(diffs):.1e}" if diffs else NONE,
    )


def unsupported(matrix: EncoderMatrix) -> Iterator[tuple[str, str]]:
    """Yield an encoder with a check and a verdict, and its reason, for every verdict other than supported."""
    for row in matrix.rows:
        for name, verdict in row.verdicts:
            if verdict.support is not Support.SUPPORTED:
                yield f"{row.encoder}, {name}: {verdict.support}", verdict.reason


def counts(summary: SupportCounts) -> str:
    """Counts of verdicts in words."""
    return (
        f"{summary.supported} have the same vectors or logits in a batch as alone, {summary.blocked} have not, "
        f"{summary.unknown} unknown"
    )
