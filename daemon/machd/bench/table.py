"""A report as a person reads it: two tables and a few lines, at 80 columns and in a pipe."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from machd.bench.figures import CeilingFigures, LevelFigures
from machd.bench.report import BenchReport, ServerFigures
from machd.bench.statistics import Distribution

__all__ = ["print_report"]

_MIB = 2**20
_GIB = 2**30
_NONE = "-"
_STEADY = 1.05
"""The most by which the bare loop's runs may differ before comparisons with it get a note."""


def print_report(report: BenchReport, console: Console) -> None:
    """Write a report."""
    for part in (_heading(report), _latencies(report), _throughput(report)):
        console.print(part)
        console.print()
    console.print(_notes(report))


def _heading(report: BenchReport) -> RenderableType:
    model, machine, work = report.model, report.machine, report.workload
    kind = (model.dtype, model.quantization, model.backend, model.blas)
    lines = [
        ", ".join(part for part in (model.id, *kind) if part),
        f"{machine.cpu}, {machine.cpu_count} CPUs, {machine.memory_bytes / _GIB:.0f} GiB",
        f"{work.endpoint}, about {work.prompt_tokens} prompt tokens, {work.max_tokens} new tokens",
    ]
    if report.url is not None:
        lines.insert(0, report.url)
    if model.versions is not None:
        versions = model.versions
        lines.insert(-1, f"machd {versions.machd}, mlx {versions.mlx}, mlx-lm {versions.mlx_lm}")
    return Text("\n".join(lines))


def _latencies(report: BenchReport) -> Table:
    table = _table()
    for name in ("first token, s", "between tokens, ms", "whole request, s"):
        table.add_column(f"{name}\n{_columns('p50', 'p90', 'p99')}", justify="right")
    for level in report.levels:
        table.add_row(
            level.mode,
            str(level.concurrency),
            _percentiles(level.ttft, per_second=1),
            _percentiles(level.itl, per_second=1000),
            _percentiles(level.latency, per_second=1),
        )
    return table


def _throughput(report: BenchReport) -> Table:
    table = _table()
    headings = ["prompt\ntokens/s", "generated\ntokens/s"]
    if report.ceilings:
        headings += ["batch\nwidth", "of bare\nloop", "between tokens\nof bare step"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for level in report.levels:
        cells = [level.mode, str(level.concurrency)]
        cells += [_number(level.prompt_tps), _number(level.generation_tps)]
        if report.ceilings:
            cells += _share_cells(level)
        table.add_row(*cells)
    return table


def _share_cells(level: LevelFigures) -> list[str]:
    share = level.ceiling
    width = _NONE if level.batch_width is None else str(level.batch_width)
    if share is None:
        return [width, _NONE, _NONE]
    per_step = share.itl_per_step
    return [width, f"{share.generation:.0%}", _NONE if per_step is None else f"{per_step:.3f} x"]


def _notes(report: BenchReport) -> RenderableType:
    lines = [_ceiling_line(ceiling) for ceiling in report.ceilings]
    lines += [_server_line(server) for server in report.servers]
    lines += _warnings(report)
    return Text("\n".join(lines))


def _ceiling_line(ceiling: CeilingFigures) -> str:
    step = ceiling.step
    return (
        f"Bare loop, width {ceiling.batch_width}: step {step.p50_s * 1000:.1f} ms, "
        f"{ceiling.decode_tps:.1f} tokens/s, with prefill {ceiling.generation_tps:.1f}; "
        f"{ceiling.runs} runs"
    )


def _server_line(server: ServerFigures) -> str:
    line = f"Server, {server.mode}: ready in {server.start_to_ready_s:.1f} s"
    ready_bytes, end_bytes = server.ready_beyond_weights_bytes, server.end_beyond_weights_bytes
    if ready_bytes is None or end_bytes is None:
        return f"{line}, RSS {_mib(server.end_rss_bytes)} at the end"
    return f"{line}, RSS less weights {_mib(ready_bytes)}, at the end {_mib(end_bytes)}"


def _warnings(report: BenchReport) -> Iterable[str]:
    if not report.workload.ignores_eos:
        yield "note: the server does not take ignore_eos, so answers may have ended early"
    for ceiling in report.ceilings:
        fastest_s, slowest_s = min(ceiling.run_step_p50_s), max(ceiling.run_step_p50_s)
        if slowest_s > fastest_s * _STEADY:
            yield (
                f"note: bare steps took {fastest_s * 1000:.1f} to {slowest_s * 1000:.1f} ms at "
                f"width {ceiling.batch_width}: the machine was not steady"
            )
    several = max(level.tokens_per_event for level in report.levels)
    if several > 1.02:
        yield (
            f"note: up to {several:.2f} tokens came in one event; 'between tokens' is the time "
            "between such events"
        )


def _table() -> Table:
    table = Table(
        header_style="", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1)
    )
    table.add_column("mode")
    table.add_column("clients", justify="right")
    return table


def _percentiles(sample: Distribution | None, *, per_second: float) -> str:
    if sample is None:
        return _NONE
    return _columns(
        *(_number(one * per_second) for one in (sample.p50_s, sample.p90_s, sample.p99_s))
    )


def _columns(*cells: str) -> str:
    """Cells of one width under one heading; columns of their own would need 90 characters."""
    return " ".join(f"{cell:>5}" for cell in cells)


def _number(value: float) -> str:
    """Three significant digits, or all of the whole part."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.0f} MiB"
