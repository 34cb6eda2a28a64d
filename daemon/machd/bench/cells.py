"""How a report's figures are written in a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from machd.bench.statistics import Distribution

NONE = "-"
"""What is not known."""


def plain_table() -> Table:
    """A table that takes as few columns of a terminal as can be."""
    return Table(
        header_style="",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
    )


def right_aligned(first: str, *others: str, no_wrap: bool = False) -> Table:
    """Make a table whose columns after the first are aligned to the right."""
    table = plain_table()
    table.add_column(first, no_wrap=no_wrap)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=no_wrap)
    return table


def titled(title: str, table: Table, notes: Sequence[str] = ()) -> RenderableType:
    """Put a title above a table, and notes below it."""
    below = (Text(), Text("\n".join(notes))) if notes else ()
    return Group(Text(title), Text(), table, *below)


def percentiles(sample: Distribution | None, *, per_second: float) -> str:
    """Median, 90th and 99th percentile under one heading."""
    if sample is None:
        return NONE
    return columns(
        *(number(one * per_second) for one in (sample.p50_s, sample.p90_s, sample.p99_s))
    )


def columns(*cells: str) -> str:
    """Cells of one width under one heading; columns of their own would need 90 characters."""
    return " ".join(f"{cell:>5}" for cell in cells)


def number(value: float) -> str:
    """Three significant digits, or all of the whole part."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def seconds(value_s: float | None) -> str:
    """Write seconds; those under one as milliseconds."""
    if value_s is None:
        return NONE
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{number(value_s)} s"


def p50_ms(sample: Distribution | None) -> str:
    """Write a median as a number of milliseconds."""
    return NONE if sample is None else number(sample.p50_s * 1000)
