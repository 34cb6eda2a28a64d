"""How a report's figures are written in a table."""

from __future__ import annotations

from rich import box
from rich.table import Table

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
