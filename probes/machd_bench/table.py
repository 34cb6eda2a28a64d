"""A report as a person reads it: a table for each scenario, and a few lines, at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from machd_bench.report import Figure, Report, Row
from machd_bench.scenario import Scenario

_NONE = "-"
_MODE = "mode"


def print_scenario(console: Console, scenario: Scenario, rows: Sequence[Row]) -> None:
    """Print the rows of all modes; nothing if there are none."""
    if not rows:
        return
    table = Table(header_style="", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    headings, lines = table_cells(scenario, rows)
    for heading in headings:
        is_text = heading in {"", _MODE}
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for cells in lines:
        table.add_row(*cells)
    modes = "" if _MODE in headings else f", {rows[0].mode}"
    console.print(f"{scenario.name}{modes}: {scenario.about}", markup=False, highlight=False)
    console.print(table)
    console.print()


def table_cells(scenario: Scenario, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings, words and unit on lines of their own, and a line of cells for each row.

    Columns that no row has a figure for are left out, and that of modes if there is one mode.
    """
    has_modes = len({row.mode for row in rows}) > 1
    columns = [[row.mode for row in rows]] if has_modes else []
    headings = [_MODE] if has_modes else []
    columns.append([row.case for row in rows])
    headings.append("")
    longest_s = max((_most(rows, name) for name in scenario.columns if _is_time(name)), default=0)
    for name in scenario.columns:
        values = [row.figures.get(name) for row in rows]
        if any(value is not None for value in values):
            unit, scale = _unit(name, _most(rows, name), longest_s)
            words = name.rpartition("_")[0] if unit else name
            headings.append(f"{words.replace('_', chr(10))}\n{unit}".strip())
            columns.append([_cell(value, scale) for value in values])
    return headings, [list(cells) for cells in zip(*columns, strict=True)]


def print_summary(console: Console, report: Report) -> None:
    """Print what was measured, on what, the goals, and the notes."""
    machine = report.machine
    versions = ("machd", "mlx", "mlx_lm")
    facts = [(f"{name} " if name in versions else "", fact) for name, fact in report.model.items()]
    shown = [f"{label}{fact}" for label, fact in facts if isinstance(fact, str)]
    weights_bytes = float(report.model.get("weights_bytes") or 0)
    memory_gb = float(machine["memory_bytes"] or 0) / 1e9
    servers = [
        f"server, {row.mode}: ready in {row.number('start_to_ready_s'):.1f} s, RSS beyond the"
        f" weights {(row.number('ready_rss_bytes') - weights_bytes) / 1e6:.0f} MB then,"
        f" {(row.number('end_rss_bytes') - weights_bytes) / 1e6:.0f} MB at the end"
        for row in report.of("server")
    ]
    lines = [
        *([report.url] if report.url else []),
        ", ".join(shown),
        f"{machine['cpu']}, {machine['cpu_count']} CPUs, {memory_gb:.0f} GB",
        f"{report.plan['prompt_tokens']} prompt tokens, {report.plan['max_tokens']} new tokens",
        *servers,
        *(f"{row.scenario}, {row.mode}, {goal}" for row in report.rows for goal in row.goals),
        *(f"note: {note}" for note in report.notes),
    ]
    console.print("\n".join(lines), markup=False, highlight=False)


_UNITS = {"share": ("%", 100.0), "ratio": ("x", 1.0), "tps": ("tokens/s", 1.0)}


def _is_time(name: str) -> bool:
    return name.endswith("_s") and not name.endswith("_per_s")


def _most(rows: Sequence[Row], name: str) -> float:
    """The largest figure of a column."""
    values = (row.figures.get(name) for row in rows)
    return max((abs(one) for one in values if isinstance(one, int | float)), default=0)


def _unit(name: str, most: float, longest_s: float) -> tuple[str, float]:
    """Unit and factor of a column, by the end of its name; all times of a table have one unit."""
    kind = name.rpartition("_")[2]
    if _is_time(name):
        return ("ms", 1e3) if longest_s < 10 else ("s", 1.0)
    if kind == "bytes":
        return ("MB", 1e-6) if most >= 1e6 else ("bytes", 1.0)
    return _UNITS.get(kind, ("", 1.0))


def _cell(value: Figure, scale: float = 1.0) -> str:
    if value is None or isinstance(value, str):
        return value or _NONE
    return f"{value}" if isinstance(value, int) and scale == 1.0 else _digits(value * scale)


def _digits(value: float) -> str:
    """Three significant digits, or all of the whole part."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
