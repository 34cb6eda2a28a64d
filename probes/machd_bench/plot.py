"""A report as a picture: a panel for everything that a picture says more of than a table."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from machd_bench.report import Report, Row, Verdict
from machd_bench.scenarios.weight_formats import overtakes

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
_KINDS = (("latency", "whole request", "--"), ("ttft", "first token", "-"), ("gap", "gap", ":"))
_MEMORY = {
    "active_bytes": "MLX, active",
    "peak_bytes": "MLX, peak",
    "rss_bytes": "resident",
    "wired_bytes": "wired, whole machine",
}
_VERDICT_COLOURS = {
    Verdict.PASS: COLOURS[2],
    Verdict.MISSED: COLOURS[1],
    Verdict.NOT_SHOWN: GREY,
}

_Panel: TypeAlias = Callable[["Axes", Report], None]


def can_plot() -> bool:
    """Tell whether matplotlib is installed."""
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
    # Without the address that matplotlib writes into every file of its own.
    figure.savefig(path, dpi=_DOTS_PER_INCH, format="png", metadata={"Software": None})


def write_plot(report: Report, path: Path) -> None:
    """Draw a report into a PNG file; needs matplotlib."""
    panels: list[_Panel] = [_first_tokens, _throughput, _latencies] if report.of("sweep") else []
    panels += [_long_prompt] if report.of("long-prompt") else []
    panels += [_experts] if report.of("experts") else []
    panels += [_weight_formats] if report.of("formats") else []
    panels += [_memory] if report.of("memory") else []
    panels += [_goals] if report.goals or not panels else []
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with saved_figure(path, (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows)) as figure:
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, draw in zip(grid, panels, strict=False):
            draw(axes, report)
            axes.spines[["top", "right"]].set_visible(False)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        model, machine = report.model, report.machine
        parts = (model.get("id"), model.get("dtype"), model.get("blas"), machine["cpu"])
        caption = ", ".join(str(part) for part in parts if part)
        tokens = f"{report.plan['prompt_tokens']} prompt tokens, {report.plan['max_tokens']} new"
        caption = (
            f"{caption}, {machine['cpu_count']} CPUs;{' ' if columns > 1 else chr(10)}{tokens}"
        )
        figure.suptitle(caption, fontsize=9, color=GREY, x=0.01, ha="left")


def _by_mode(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    modes = dict.fromkeys(row.mode for row in rows)
    for colour, mode in zip(COLOURS, modes, strict=False):
        of_mode = [row for row in rows if row.mode == mode]
        yield colour, mode, sorted(of_mode, key=lambda row: row.number("clients"))


def _first_tokens(axes: Axes, report: Report) -> None:
    medians: list[float] = []
    for colour, mode, rows in _by_mode(report.of("sweep")):
        clients, p50, p90 = _columns(rows, "clients", "ttft_p50_s", "ttft_p90_s")
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
        axes.plot(*_columns(rows, "clients", "tps"), marker="o", color=colour, label=mode)
    if ceilings := report.of("ceiling"):
        points = _columns(ceilings, "batch_width", "tps")
        label = "ceiling: bare loop, as wide as there are clients"
        axes.plot(*points, linestyle="--", marker="_", color=GREY, label=label)
    axes.set_ylim(bottom=0)
    _title(axes, "Generated tokens/s, all clients together", "tokens/s")
    _clients_axis(axes, report)


def _columns(rows: Sequence[Row], *names: str) -> list[list[float]]:
    return [[row.number(name) for row in rows] for name in names]


def _clients_axis(axes: Axes, report: Report) -> None:
    clients = sorted({row.number("clients") for row in report.of("sweep")})
    if len(clients) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(clients, [f"{one:g}" for one in clients])
    axes.minorticks_off()
    axes.set_xlabel("clients")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)


def _latencies(axes: Axes, report: Report) -> None:
    """Draw the busiest level; colours are the modes' of the panels beside it."""
    for kind, label, style in _KINDS:
        axes.plot([], [], style, color=GREY, label=label)
        for colour, _, rows in _by_mode(report.of("sweep")):
            values = [rows[-1].number(f"{kind}_{one}_s") for one in _PERCENTILES]
            if any(values):
                axes.plot(_PERCENTILES, values, style, marker="o", color=colour)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    most = max(row.number("clients") for row in report.of("sweep"))
    _title(axes, f"Latencies at {most:g} clients", "seconds")


def _long_prompt(axes: Axes, report: Report) -> None:
    for colour, mode, (row, *_) in _by_mode(report.of("long-prompt")):
        gaps_ms = [gap_s * 1000 for gap_s in row.samples["gap_s"]]
        ended_s = row.samples["gap_ended_s"]
        axes.scatter(ended_s, gaps_ms, s=6, color=colour, alpha=0.5, label=mode)
        axes.axvspan(0, row.number("ttft_s"), color=colour, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since it arrived; shaded until its first token")
    _title(axes, "Token gaps of streams that a long prompt joins", "milliseconds")


def _experts(axes: Axes, report: Report) -> None:
    """Draw tokens/s by the share in memory; a dashed line is the model in memory."""
    every = report.of("experts")
    for colour, streams in zip(
        COLOURS, sorted({row.number("streams") for row in every}), strict=False
    ):
        rows = [row for row in every if row.number("streams") == streams]
        banked = sorted(
            (row for row in rows if row.figures["share"] is not None),
            key=lambda row: row.number("share"),
        )
        shares, tps = _columns(banked, "share", "tps")
        axes.plot(shares, tps, marker="o", color=colour, label=f"{streams:g} streams")
        for row in rows:
            if row.figures["share"] is None:
                axes.axhline(row.number("tps"), linestyle="--", color=colour, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("share of the experts in memory; dashed: the whole model")
    _title(axes, "Tokens/s with experts on disk", "tokens/s")


def _weight_formats(axes: Axes, report: Report) -> None:
    """Draw tokens/s by width; a ring is where a format becomes faster than others."""
    every = [row for row in report.of("formats") if "width" in row.figures]
    names = list(dict.fromkeys(str(row.figures["format"]) for row in every))
    widths = sorted({row.number("width") for row in every})
    tps = {
        name: [[row.number("tps")] for row in every if row.figures["format"] == name]
        for name in names
    }
    for name, marker in zip(names, "os^vDPX*", strict=False):
        axes.plot(widths, [one for (one,) in tps[name]], marker=marker, label=name, linewidth=1.2)
        for index in range(1, len(widths)):
            overtaken = [other for other in names if overtakes(tps[name], tps[other]) == index]
            if overtaken:
                at = widths[index], tps[name][index][0]
                axes.scatter([at[0]], [at[1]], s=150, facecolors="none", edgecolors=GREY)
                text = f"{name} over {', '.join(overtaken)}"
                axes.annotate(text, at, xytext=(4, 8), textcoords="offset points", fontsize=6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(widths, [f"{one:g}" for one in widths])
    axes.minorticks_off()
    axes.set_xlabel("batch width; a ring: faster than others from here on")
    _title(axes, "Tokens/s in each weight format", "tokens/s")


def _memory(axes: Axes, report: Report) -> None:
    """Draw each kind of memory by load."""
    rows = report.of("memory")
    for colour, (name, label) in zip(COLOURS, _MEMORY.items(), strict=False):
        if any(row.number(name) for row in rows):
            values_gb = [row.number(name) / 1e9 for row in rows]
            axes.plot(range(len(rows)), values_gb, marker="o", color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(rows)), [row.case for row in rows], fontsize=7)
    _title(axes, "Memory by load", "GB")


def _goals(axes: Axes, report: Report) -> None:
    """Draw the share that each figure takes of the most that its goal allows."""
    goals = [one for one in report.goals if one.figure is not None][::-1]
    for index, goal in enumerate(goals):
        figure = max(goal.figure or 0.0, 1e-3)
        share = figure / goal.goal if goal.bound == "at most" else goal.goal / figure
        axes.barh(index, min(share, 2.0), color=_VERDICT_COLOURS[goal.verdict], alpha=0.5)
        axes.text(0.02, index, goal.name, va="center", fontsize=7)
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1.2)
    axes.set_yticks([])
    axes.set_xlabel("a bar that ends left of 1 reaches its goal; cut off at twice the goal")
    _title(axes, "Goals", "")


def _title(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(unit)
