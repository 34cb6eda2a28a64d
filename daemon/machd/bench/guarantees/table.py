"""The guarantees as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from machd.bench.cells import NONE, number, plain_table
from machd.bench.guarantees.figures import GuaranteeFigures


def guarantee_tables(rows: Sequence[GuaranteeFigures]) -> Iterable[RenderableType]:
    """One table with a row for each guarantee, and the reasons of those without a figure."""
    table = plain_table()
    table.add_column("guarantee", no_wrap=True)
    for heading in ("goal", "median", "worst", "tries"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(
            *(row.guarantee, _seconds(row.goal_s), _seconds(row.p50_s), _seconds(row.worst_s)),
            *(str(row.tries), row.verdict.value),
        )
    yield Group(Text("Guarantees; the worst try decides"), Text(), table)
    reasons = [f"not measured: {one.guarantee}: {one.reason}" for one in rows if one.reason]
    if reasons:
        yield Text("\n".join(reasons))


def _seconds(value_s: float | None) -> str:
    if value_s is None:
        return NONE
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{number(value_s)} s"
