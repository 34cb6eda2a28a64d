"""A report as a person reads it: tables and a few lines, at 80 columns and in a pipe."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from machd.bench.cells import NONE, columns, number, percentiles, plain_table
from machd.bench.figures import CeilingFigures, LevelFigures
from machd.bench.guarantees.table import guarantee_tables
from machd.bench.modes import CONTINUOUS, STATIC
from machd.bench.prefix.table import prefix_tables
from machd.bench.report import BenchReport, ServerFigures
from machd.bench.scenario_tables import scenario_tables
from machd.bench.speculation.table import speculation_tables
from machd.bench.structured import StructuredFigures

_MIB = 2**20
_GIB = 2**30
_STEADY = 1.05
"""The most by which the bare loop's runs may differ before comparisons with it get a note."""


class ReportPrinter:
    """Writes a report while it grows: each part once, and at once, also into a pipe."""

    def __init__(self, console: Console) -> None:
        """Prepare; nothing is written yet."""
        self._console = console
        self._written = 0

    def show(self, report: BenchReport) -> None:
        """Write the parts that came since the last time; those that were written stay as they are."""
        parts = _parts(report)
        for part in parts[self._written :]:
            self._console.print(part)
            self._console.print()
        self._written = len(parts)

    def finish(self, report: BenchReport) -> None:
        """Write what is missing, and the notes, which are about all of it."""
        self.show(report)
        self._console.print(_notes(report))


def _parts(report: BenchReport) -> list[RenderableType]:
    sweep = (_latencies(report), _throughput(report)) if report.levels else ()
    prefix = chain.from_iterable(map(prefix_tables, report.prefix))
    speculation = speculation_tables(report.speculation) if report.speculation else ()
    guarantees = guarantee_tables(report.guarantees) if report.guarantees else ()
    parts = (sweep, scenario_tables(report), speculation, guarantees, prefix)
    return [_heading(report), *chain.from_iterable(parts)]


def _heading(report: BenchReport) -> RenderableType:
    model, machine, work = report.model, report.machine, report.workload
    kind = (model.dtype, model.quantization, model.backend, model.blas)
    lines = [
        ", ".join(part for part in (model.id, *kind) if part),
        f"{machine.cpu}, {machine.cpu_count} CPUs, {machine.memory_bytes / _GIB:.0f} GiB",
        work.endpoint or "no server",
    ]
    if not report.prefix and not report.guarantees and report.speculation is None:
        lines[-1] += f", {_workload(report)}"
    if report.url is not None:
        lines.insert(0, report.url)
    if model.versions is not None:
        versions = model.versions
        lines.insert(-1, f"machd {versions.machd}, mlx {versions.mlx}, mlx-lm {versions.mlx_lm}")
    return Text("\n".join(lines))


def _workload(report: BenchReport) -> str:
    work = report.workload
    return f"about {work.prompt_tokens} prompt tokens, {work.max_tokens} new tokens"


def _latencies(report: BenchReport) -> Table:
    table = _level_table()
    for name in ("first token, s", "token gaps, ms", "whole request, s"):
        table.add_column(f"{name}\n{columns('p50', 'p90', 'p99')}", justify="right")
    for level in report.levels:
        table.add_row(
            level.mode,
            str(level.concurrency),
            percentiles(level.ttft, per_second=1),
            percentiles(level.itl, per_second=1000),
            percentiles(level.latency, per_second=1),
        )
    return table


def _throughput(report: BenchReport) -> Table:
    table = _level_table()
    headings = ["prompt\ntokens/s", "generated\ntokens/s"]
    if report.ceilings:
        headings += ["batch\nwidth", "of bare\nloop", "token gap of\nbare step"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for level in report.levels:
        cells = [level.mode, str(level.concurrency)]
        cells += [number(level.prompt_tps), number(level.generation_tps)]
        if report.ceilings:
            cells += _share_cells(level)
        table.add_row(*cells)
    return table


def _level_table() -> Table:
    table = plain_table()
    table.add_column("mode")
    table.add_column("clients", justify="right")
    return table


def _share_cells(level: LevelFigures) -> list[str]:
    share = level.ceiling
    width = NONE if level.batch_width is None else str(level.batch_width)
    if share is None:
        return [width, NONE, NONE]
    per_step = share.itl_per_step
    return [width, f"{share.generation:.0%}", NONE if per_step is None else f"{per_step:.3f} x"]


def _notes(report: BenchReport) -> RenderableType:
    lines = [_ceiling_line(ceiling) for ceiling in report.ceilings]
    lines += [_server_line(server) for server in report.servers]
    if any(one.kv_formats for one in report.prefix):
        lines.append(f"The streams of formats: {_workload(report)}")
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
    yield from _warnings_of_answers(report)
    yield from _warnings_of_modes(report)
    for ceiling in report.ceilings:
        fastest_s, slowest_s = min(ceiling.run_step_p50_s), max(ceiling.run_step_p50_s)
        if slowest_s > fastest_s * _STEADY:
            yield (
                f"note: bare steps took {fastest_s * 1000:.1f} to {slowest_s * 1000:.1f} ms at "
                f"width {ceiling.batch_width}: the machine was not steady"
            )


def _warnings_of_answers(report: BenchReport) -> Iterable[str]:
    if not report.workload.ignores_eos:
        yield "note: the server does not take ignore_eos, so answers may have ended early"
    counted: list[LevelFigures | StructuredFigures] = [*report.levels, *report.structured]
    asked = sum(one.requests for one in counted) * report.workload.max_tokens
    given = sum(one.completion_tokens for one in counted)
    if given < asked:
        yield f"note: answers ended early: {given} tokens of {asked} that were asked for"
    several = max((level.tokens_per_event for level in report.levels if level.itl), default=1.0)
    if several > 1.02:
        yield (
            f"note: up to {several:.2f} tokens came in one event; token gaps are the time between "
            "such events"
        )


def _warnings_of_modes(report: BenchReport) -> Iterable[str]:
    for server in report.servers:
        if server.mode == CONTINUOUS.name and server.decode_mode not in {None, "batched"}:
            yield (
                f"note: the server of the mode {server.mode} decodes in mode "
                f"{server.decode_mode}: {server.decode_mode_reason}"
            )
    modes = {level.mode for level in report.levels} | {one.mode for one in report.staggered}
    if STATIC.name in modes:
        yield (
            "static: mlx-lm's batch_generate, without HTTP; a batch takes one request of every "
            "client, and their first tokens are there when it has ended"
        )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.0f} MiB"
