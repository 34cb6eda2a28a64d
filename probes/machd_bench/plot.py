"""A report as a picture: a panel for everything that a picture says more of than a table."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from machd_bench.report import Report, Row, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Of Okabe and Ito: told apart with any kind of colour vision."""
GREY = "#666666"
_PANEL_INCHES = (5.2, 4.2)
_DOTS_PER_INCH = 150
_LOGARITHMIC_FROM = 20.0
"""Between the largest and the smallest of the values: above, a linear scale hides the small."""
_PERCENTILES = ("p50", "p90", "p99")

_Panel: TypeAlias = Callable[["Axes", Report], None]


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def saved_figure(path: Path, size_inches: tuple[float, float]) -> Iterator[Figure]:
    """An empty picture, which is written into a PNG file once it is drawn."""
    # Not pyplot: it keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=size_inches, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")


def write_plot(report: Report, path: Path) -> None:
    """Draw a report into a PNG file; needs matplotlib."""
    panels: list[_Panel] = []
    if report.of("sweep"):
        panels += [_first_tokens, _throughput, _latencies]
    if report.of("long-prompt"):
        panels.append(_long_prompt)
    if report.goals or not panels:
        panels.append(_goals)
    columns = min(len(panels), 3 if len(panels) == 3 else 2)
    rows = -(-len(panels) // columns)
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows)
    with saved_figure(path, size) as figure:
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, draw in zip(grid, panels, strict=False):
            draw(axes, report)
            axes.spines[["top", "right"]].set_visible(False)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        model, machine = report.model, report.machine
        parts = (model["id"], model.get("dtype"), model.get("blas"), machine["cpu"])
        caption = ", ".join(str(part) for part in parts if part)
        caption += f", {machine['cpu_count']} CPUs"
        tokens = f"{report.plan['prompt_tokens']} prompt tokens, {report.plan['max_tokens']} new"
        figure.suptitle(f"{caption}\n{tokens}", fontsize=9, color=GREY, x=0.01, ha="left")


def _by_mode(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    modes = dict.fromkeys(row.mode for row in rows)
    for colour, mode in zip(COLOURS, modes, strict=False):
        of_mode = [row for row in rows if row.mode == mode]
        yield colour, mode, sorted(of_mode, key=lambda row: row.number("clients"))


def _first_tokens(axes: Axes, report: Report) -> None:
    medians: list[float] = []
    for colour, mode, rows in _by_mode(report.of("sweep")):
        clients = [row.number("clients") for row in rows]
        p50, p90 = ([row.number(f"ttft_{one}_s") for row in rows] for one in ("p50", "p90"))
        axes.plot(clients, p50, marker="o", color=colour, label=mode)
        axes.fill_between(clients, p50, p90, color=colour, alpha=0.15, linewidth=0)
        medians += p50
    if max(medians) > _LOGARITHMIC_FROM * min(medians):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)
    _title(axes, "Time to first token: median, and up to p90", "seconds")
    _clients_axis(axes, report)


def _throughput(axes: Axes, report: Report) -> None:
    for colour, mode, rows in _by_mode(report.of("sweep")):
        clients = [row.number("clients") for row in rows]
        axes.plot(
            clients, [row.number("tps") for row in rows], marker="o", color=colour, label=mode
        )
    ceilings = report.of("ceiling")
    if ceilings:
        widths = [row.number("batch_width") for row in ceilings]
        speeds = [row.number("tps") for row in ceilings]
        marker = "_" if len(widths) == 1 else ""
        label = "ceiling: bare loop, as wide as there are clients"
        axes.plot(widths, speeds, linestyle="--", marker=marker, color=GREY, label=label)
    axes.set_ylim(bottom=0)
    _title(axes, "Generated tokens/s, all clients together", "tokens/s")
    _clients_axis(axes, report)


def _clients_axis(axes: Axes, report: Report) -> None:
    clients = sorted({row.number("clients") for row in report.of("sweep")})
    if len(clients) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(clients, [f"{one:g}" for one in clients])
    axes.minorticks_off()
    axes.set_xlabel("clients")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)


def _latencies(axes: Axes, report: Report) -> None:
    """Percentiles of the busiest level, a line for each mode and kind of latency."""
    kinds = {"ttft": "first token", "gap": "token gap", "latency": "whole request"}
    styles = dict(zip(kinds, ("-", ":", "--"), strict=True))
    for colour, mode, rows in _by_mode(report.of("sweep")):
        for kind, name in kinds.items():
            values = [rows[-1].number(f"{kind}_{one}_s") for one in _PERCENTILES]
            if any(values):
                label = f"{mode}, {name}"
                axes.plot(_PERCENTILES, values, styles[kind], marker="o", color=colour, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    most = max(row.number("clients") for row in report.of("sweep"))
    _title(axes, f"Latencies at {most:g} clients", "seconds")


def _long_prompt(axes: Axes, report: Report) -> None:
    for colour, mode, rows in _by_mode(report.of("long-prompt")):
        samples = rows[0].samples
        gaps_ms = [gap * 1000 for gap in samples["gap_s"]]
        axes.scatter(samples["gap_ended_s"], gaps_ms, s=6, color=colour, alpha=0.5, label=mode)
        axes.axvspan(0, rows[0].number("ttft_s"), color=colour, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the long prompt arrived; shaded until its first token")
    _title(axes, "Gaps between the running streams' tokens", "milliseconds")


def _goals(axes: Axes, report: Report) -> None:
    """How far each figure is from its goal: 1 is the goal, to its left is reached."""
    colours = {Verdict.PASS: COLOURS[2], Verdict.MISSED: COLOURS[1], Verdict.NOT_SHOWN: GREY}
    goals = [one for one in report.goals if one.figure is not None][::-1]
    for index, goal in enumerate(goals):
        figure = max(goal.figure or 0.0, 1e-3)
        distance = figure / goal.goal if goal.bound == "at most" else goal.goal / figure
        axes.barh(index, min(distance, 2.0), color=colours[goal.verdict])
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1.2)
    axes.set_yticks(range(len(goals)), [one.name for one in goals], fontsize=7)
    axes.set_xlabel("of what the goal allows; a bar that ends left of 1 reaches it")
    _title(axes, "Goals", "")


def _title(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(unit)
