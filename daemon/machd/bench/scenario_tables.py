"""The scenarios beside the sweep, a small table each, with what the project wants of them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from machd.bench.cells import NONE, columns, number, percentiles, plain_table
from machd.bench.coalescing import COALESCING_GOAL, CoalescingFigures
from machd.bench.long_prompt import LONG_PROMPT_GOAL, LongPromptFigures
from machd.bench.report import BenchReport
from machd.bench.staggered import STAGGERED_GOAL, StaggeredFigures
from machd.bench.statistics import Distribution
from machd.bench.structured import STRUCTURED_GOAL, StructuredFigures


def scenario_tables(report: BenchReport) -> Iterable[RenderableType]:
    """A table for each scenario that ran."""
    if report.staggered:
        yield _staggered(report.staggered)
    if report.long_prompt:
        yield _long_prompt(report.long_prompt)
    if report.coalescing:
        yield _coalescing(report.coalescing)
    if report.structured:
        yield _structured(report.structured)


def _staggered(rows: list[StaggeredFigures]) -> RenderableType:
    first = rows[0]
    title = (
        f"{first.streams} requests, one every {first.interval_s * 1000:.0f} ms "
        f"(goal: the first token {STAGGERED_GOAL:g} x sooner than static's)"
    )
    table = plain_table()
    table.add_column("mode")
    for name in ("first token, s", "whole request, s"):
        table.add_column(f"{name}\n{columns('p50', 'p90', 'p99')}", justify="right")
    table.add_column("first token,\nsooner than\nstatic's", justify="right")
    for row in rows:
        ratio = row.static_ttft_ratio
        table.add_row(
            row.mode,
            percentiles(row.ttft, per_second=1),
            percentiles(row.latency, per_second=1),
            NONE if ratio is None else f"{ratio:.2f} x",
        )
    return Group(Text(title), Text(), table)


def _long_prompt(rows: list[LongPromptFigures]) -> RenderableType:
    first = rows[0]
    title = (
        f"A prompt of {first.prompt_tokens or 'many'} tokens joins {first.streams} streams "
        f"(goal: gaps at most {LONG_PROMPT_GOAL:g} x)"
    )
    table = plain_table()
    table.add_column("mode")
    for heading in (
        "its first\ntoken, s",
        "gaps before,\np50, ms",
        "gaps meanwhile,\np50, ms",
        "gaps meanwhile,\np99, ms",
        "p99 over\np50 before",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.mode,
            number(row.ttft_s),
            number(row.before.p50_s * 1000),
            number(row.during.p50_s * 1000),
            number(row.during.p99_s * 1000),
            f"{row.p99_ratio:.2f} x",
        )
    return Group(Text(title), Text(), table)


def _coalescing(rows: list[CoalescingFigures]) -> RenderableType:
    copies = rows[0].copies
    title = f"{copies} identical requests at once (goal: at most {COALESCING_GOAL:g} x one alone)"
    table = plain_table()
    table.add_column("mode")
    for heading in ("one alone, s", f"{copies} together, s", "ratio", "answered by another"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.mode,
            number(row.alone_s),
            number(row.together_s),
            f"{row.ratio:.2f} x",
            f"{row.coalesced} of {row.copies}",
        )
    return Group(Text(title), Text(), table)


def _structured(rows: list[StructuredFigures]) -> RenderableType:
    first = rows[0]
    title = (
        f"{first.streams} completions, {first.constrained} of them held to JSON schemas "
        f"(goal: at least {STRUCTURED_GOAL:g} x as fast)"
    )
    table = plain_table()
    table.add_column("mode")
    for heading in (
        "tokens/s,\nall plain",
        "tokens/s,\nmixed",
        "ratio",
        "plain gaps,\np50, ms",
        "beside\nschemas",
        "kept to\nschemas",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.mode,
            number(row.plain_tps),
            number(row.mixed_tps),
            f"{row.ratio:.2f} x",
            _p50_ms(row.plain_itl),
            _p50_ms(row.mixed_itl),
            f"{row.kept} of {row.constrained}",
        )
    return Group(Text(title), Text(), table)


def _p50_ms(sample: Distribution | None) -> str:
    return NONE if sample is None else number(sample.p50_s * 1000)
