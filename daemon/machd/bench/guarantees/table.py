"""The guarantees as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.text import Text

from machd.bench.cells import right_aligned, seconds, titled
from machd.bench.guarantees.figures import GuaranteeFigures


def guarantee_tables(rows: Sequence[GuaranteeFigures]) -> Iterable[RenderableType]:
    """One table with a row for each guarantee, and the reasons of those without a figure."""
    table = right_aligned("guarantee", "goal", "median", "worst", "tries", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(
            *(row.guarantee, seconds(row.goal_s), seconds(row.p50_s), seconds(row.worst_s)),
            *(str(row.tries), row.verdict.value),
        )
    yield titled("Guarantees; the worst try decides", table)
    reasons = [f"not measured: {one.guarantee}: {one.reason}" for one in rows if one.reason]
    if reasons:
        yield Text("\n".join(reasons))
