"""The matrix as a person reads it: tables and a few lines, at 80 columns and in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from msgspec import UnsetType
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from machd.capabilities.rules import PrefixVerdict
from machd.capabilities.verdict import Support, Verdict
from machd_probes.report import MatrixReport, MatrixRow, MatrixVersions, SupportCounts

NONE = "-"
"""Cell of a value that is unknown or was not measured."""

_MARKS = {Support.SUPPORTED: "yes", Support.BLOCKED: "no", Support.UNKNOWN: "?"}
STYLES = {"yes": "green", "full": "green", "snapshot": "green", "no": "red", "?": "yellow"}
"""Styles of the marks in a table."""

_WITHOUT_KIND = "not built"


class _Verdict(Protocol):
    @property
    def support(self) -> Support | UnsetType: ...


def print_matrix(matrix: MatrixReport, console: Console) -> None:
    """Write the tables, what stands behind every verdict but "supported", and the counts."""
    name_width = max((len(row.architecture or "") for row in matrix.architectures), default=1)
    for kind, rows in by_kind(matrix.architectures):
        console.print(Text(f"{kind} ({len(rows)})", style="bold"))
        console.print(_table(rows, name_width))
        console.print()
    _print_experts(matrix, console)
    _print_adapters(matrix, console)
    _print_bitwise(matrix, console)
    _print_reasons(matrix, console)
    _print_errors(matrix, console)
    console.print(Text("\n".join(_summary_lines(matrix))))


def by_kind(rows: Iterable[MatrixRow]) -> list[tuple[str, list[MatrixRow]]]:
    """Rows by kind of cache, the kind with most rows first; those without a model come last."""
    groups: dict[str, list[MatrixRow]] = {}
    for row in rows:
        groups.setdefault(row.kv_cache_kind or _WITHOUT_KIND, []).append(row)
    return sorted(
        groups.items(), key=lambda group: (group[0] == _WITHOUT_KIND, -len(group[1]), group[0])
    )


def by_reason(
    rows: Iterable[MatrixRow], feature: str = "continuous_batching"
) -> Iterator[tuple[str, str, list[str]]]:
    """Verdict on a feature, reason, and the architectures it is the reason for, supported ones left out."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        verdict: Verdict | None = getattr(row, feature)
        if verdict is not None and verdict.support is not Support.SUPPORTED:
            groups.setdefault((verdict.support, verdict.reason), []).append(row.architecture or "")
    for (verdict_name, reason), names in sorted(groups.items()):
        yield verdict_name, reason, names


def bitwise_names(matrix: MatrixReport) -> list[str]:
    """Architectures of which a row has the same bits however it is computed."""
    return [
        row.architecture or "" for row in matrix.architectures if row.bitwise and row.bitwise.value
    ]


def mark(verdict: _Verdict | UnsetType | None) -> str:
    """A verdict in a table: ``yes``, ``no``, ``?``, or a dash without a verdict."""
    if verdict is None or isinstance(verdict, UnsetType) or isinstance(verdict.support, UnsetType):
        return NONE
    return _MARKS[verdict.support]


def prefix_mark(verdict: PrefixVerdict | None) -> str:
    """The same of the prefix cache, with how much of a prompt it can serve."""
    if verdict is None or verdict.support is not Support.SUPPORTED:
        return mark(verdict)
    return verdict.extent


def measured_on(versions: MatrixVersions) -> str:
    """Versions and what computed, in one line."""
    kind = (versions.backend, versions.blas, versions.dtype)
    return ", ".join(
        (
            f"machd {versions.machd}",
            f"mlx {versions.mlx}",
            f"mlx-lm {versions.mlx_lm}",
            *(part for part in kind if part),
        )
    )


def _table(rows: Sequence[MatrixRow], name_width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("\narchitecture", min_width=max(name_width, 12), no_wrap=True)
    for heading, width in (
        ("\nbatch", 5),
        ("\nrows", 4),
        ("\nwrong", 5),
        ("\nnats", 5),
        ("prefix\ncache", 8),
        ("spec-\ndec", 4),
        ("batched\nspecdec", 7),
        ("quant\nKV", 5),
        ("in\nchunks", 6),
    ):
        is_figure = heading in {"\nrows", "\nwrong", "\nnats"}
        table.add_column(
            heading, min_width=width, no_wrap=True, justify="right" if is_figure else "left"
        )
    for row in rows:
        cells = (
            mark(row.continuous_batching),
            *_figures(row),
            prefix_mark(row.prefix_cache),
            mark(row.speculation),
            mark(row.batched_specdec),
            mark(row.kv_quantization),
            mark(row.chunked_prefill),
        )
        table.add_row(
            Text(row.architecture or ""), *(Text(cell, STYLES.get(cell, "")) for cell in cells)
        )
    return table


def _figures(row: MatrixRow) -> tuple[str, str, str]:
    verdict = row.continuous_batching
    if verdict is None or isinstance(verdict.evidence, UnsetType):
        return NONE, NONE, NONE
    evidence = verdict.evidence
    return (
        str(evidence.cases),
        str(evidence.token_mismatches),
        f"{evidence.max_logprob_diff:.0e}" if evidence.max_logprob_diff else "0",
    )


def _print_experts(matrix: MatrixReport, console: Console) -> None:
    """Write which architectures with experts can leave them on disk; a column would exceed 80."""
    for support, heading in (
        (Support.SUPPORTED, "experts on disk"),
        (Support.UNKNOWN, "experts on disk, not known"),
    ):
        names = [
            row.architecture or ""
            for row in matrix.architectures
            if row.expert_streaming is not None and row.expert_streaming.support is support
        ]
        _print_names(heading, names, console)


def _print_adapters(matrix: MatrixReport, console: Console) -> None:
    """Write which architectures serve adapters, and why the others do not."""
    names = [
        row.architecture or ""
        for row in matrix.architectures
        if row.batched_adapters is not None and row.batched_adapters.support is Support.SUPPORTED
    ]
    _print_names("adapters", names, console)
    for verdict, reason, others in by_reason(matrix.architectures, "batched_adapters"):
        console.print(Text(f"adapters {verdict}: {', '.join(others)}", style="bold"))
        console.print(Padding(Text(reason), (0, 0, 0, 2)))
        console.print()


def _print_bitwise(matrix: MatrixReport, console: Console) -> None:
    """Write which architectures differ by no bit; why the others do is in the JSON."""
    _print_names("a row has the same bits alone and in a batch", bitwise_names(matrix), console)


def _print_names(heading: str, names: Sequence[str], console: Console) -> None:
    if names:
        console.print(Text(f"{heading} ({len(names)})", style="bold"))
        console.print(Padding(Text(", ".join(names)), (0, 0, 0, 2)))
        console.print()


def _print_reasons(matrix: MatrixReport, console: Console) -> None:
    for verdict, reason, names in by_reason(matrix.architectures):
        console.print(Text(f"{verdict}: {', '.join(names)}", style="bold"))
        console.print(Padding(Text(reason), (0, 0, 0, 2)))
        console.print()


def _print_errors(matrix: MatrixReport, console: Console) -> None:
    lines = [
        f"{row.architecture}, {probe.probe}: {probe.detail or 'no detail'}"
        for row in matrix.architectures
        for probe in row.errors
    ]
    if lines:
        console.print(Text("ended in an error:", style="bold"))
        console.print(Padding(Text("\n".join(lines)), (0, 0, 0, 2)))
        console.print()


def _summary_lines(matrix: MatrixReport) -> Iterator[str]:
    yield measured_on(matrix.versions)
    count = len(matrix.architectures)
    noun = "architecture" if count == 1 else "architectures"
    yield f"{count} {noun}: {_counts(matrix.summary)}"
    if not matrix.complete:
        yield "incomplete: interrupted before every architecture was probed"


def _counts(summary: SupportCounts) -> str:
    return (
        f"{summary.supported} can be batched, {summary.blocked} cannot, {summary.unknown} unknown"
    )
