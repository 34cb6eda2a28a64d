"""The scenarios beside the sweep, a small table each, with what the project wants of them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType

from machd.bench.cells import (
    NONE,
    columns,
    number,
    p50_ms,
    percentiles,
    right_aligned,
    titled,
)
from machd.bench.coalescing import COALESCING_GOAL, CoalescingFigures
from machd.bench.long_prompt import LONG_PROMPT_GOAL, LongPromptFigures
from machd.bench.report import BenchReport
from machd.bench.staggered import STAGGERED_GOAL, StaggeredFigures
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
    quantiles = columns("p50", "p90", "p99")
    table = right_aligned(
        "mode",
        f"first token, s\n{quantiles}",
        f"whole request, s\n{quantiles}",
        "first token,\nsooner than\nstatic's",
    )
    for row in rows:
        ratio = row.static_ttft_ratio
        table.add_row(
            row.mode,
            percentiles(row.ttft, per_second=1),
            percentiles(row.latency, per_second=1),
            NONE if ratio is None else f"{ratio:.2f} x",
        )
    return titled(title, table)


def _long_prompt(rows: list[LongPromptFigures]) -> RenderableType:
    first = rows[0]
    title = (
        f"A prompt of {first.prompt_tokens or 'many'} tokens joins {first.streams} streams "
        f"(goal: gaps at most {LONG_PROMPT_GOAL:g} x)"
    )
    table = right_aligned(
        *("mode", "its first\ntoken, s", "gaps before,\np50, ms"),
        *("gaps meanwhile,\np50, ms", "gaps meanwhile,\np99, ms", "p99 over\np50 before"),
    )
    for row in rows:
        table.add_row(
            row.mode,
            *(number(row.ttft_s), p50_ms(row.before)),
            *(p50_ms(row.during), number(row.during.p99_s * 1000)),
            f"{row.p99_ratio:.2f} x",
        )
    return titled(title, table)


def _coalescing(rows: list[CoalescingFigures]) -> RenderableType:
    copies = rows[0].copies
    title = f"{copies} identical requests at once (goal: at most {COALESCING_GOAL:g} x one alone)"
    table = right_aligned(
        "mode", "one alone, s", f"{copies} together, s", "ratio", "answered by another"
    )
    for row in rows:
        table.add_row(
            *(row.mode, number(row.alone_s), number(row.together_s), f"{row.ratio:.2f} x"),
            f"{row.coalesced} of {row.copies}",
        )
    return titled(title, table)


def _structured(rows: list[StructuredFigures]) -> RenderableType:
    first = rows[0]
    title = (
        f"{first.streams} completions, {first.constrained} of them held to JSON schemas "
        f"(goal: at least {STRUCTURED_GOAL:g} x as fast)"
    )
    table = right_aligned(
        *("mode", "tokens/s,\nall plain", "tokens/s,\nmixed", "ratio"),
        *("plain gaps,\np50, ms", "beside\nschemas", "kept to\nschemas"),
    )
    for row in rows:
        table.add_row(
            row.mode,
            *(number(row.plain_tps), number(row.mixed_tps), f"{row.ratio:.2f} x"),
            *(p50_ms(row.plain_itl), p50_ms(row.mixed_itl)),
            f"{row.kept} of {row.constrained}",
        )
    return titled(title, table)
