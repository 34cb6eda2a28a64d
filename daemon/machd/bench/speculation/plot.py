"""Guessing ahead as a picture: tokens/s with and without, and how many guesses are right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from machd.bench.plot import COLOURS, GREY, report_caption, saved_figure
from machd.bench.report import BenchReport
from machd.bench.speculation.figures import Spread, WorkloadFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (10.0, 4.4)
_BAR_SHARE = 0.38


def write_speculation_plot(report: BenchReport, path: Path) -> None:
    """Draw what was measured of guesses into a PNG file; needs matplotlib."""
    figures = report.speculation
    assert figures is not None, "guesses were measured"
    with saved_figure(path, _SIZE_INCHES) as figure:
        speeds, shares = figure.subplots(1, 2)
        _draw_speeds(speeds, figures.workloads)
        _draw_shares(shares, figures.workloads)
        for axes in (speeds, shares):
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False)
        caption = f"{report_caption(report)}; {figures.mode}, {figures.rounds} rounds"
        figure.suptitle(caption, fontsize=9, color=GREY, x=0.01, ha="left")


def _draw_speeds(axes: Axes, workloads: list[WorkloadFigures]) -> None:
    """Two bars a workload, its ratio on the second; the whiskers are the rounds' quartiles."""
    off, on = [one.off_tps for one in workloads], [one.on_tps for one in workloads]
    for index, (name, spreads) in enumerate((("off", off), ("on", on))):
        drawn = axes.bar(
            [place + (index - 0.5) * _BAR_SHARE for place in range(len(spreads))],
            [one.p50 for one in spreads],
            width=_BAR_SHARE,
            yerr=_whiskers(spreads),
            color=COLOURS[index],
            ecolor=GREY,
            label=f"speculation {name}",
        )
        if name == "on":
            ratios = [f"{one.ratio.p50:.2f} x" for one in workloads]
            axes.bar_label(drawn, labels=ratios, fontsize=9, padding=2)
    axes.set_xticks(range(len(workloads)), [one.workload.value for one in workloads])
    axes.set_title("Tokens/s of one stream: median, quartiles", loc="left", fontsize=11)
    axes.set_ylabel("tokens/s")
    axes.margins(y=0.15)


def _whiskers(spreads: list[Spread]) -> tuple[list[float], list[float]]:
    return [one.p50 - one.p25 for one in spreads], [one.p75 - one.p50 for one in spreads]


def _draw_shares(axes: Axes, workloads: list[WorkloadFigures]) -> None:
    """A line a workload; none where the daemon does not count by position."""
    most = 1
    for colour, one in zip(COLOURS, workloads, strict=False):
        shares = one.guesses.acceptance_by_position if one.guesses else []
        most = max(most, len(shares))
        axes.plot(
            range(1, len(shares) + 1), shares, marker="o", color=colour, label=one.workload.value
        )
    axes.set_title("Guesses right with all before them, share", loc="left", fontsize=11)
    axes.set_xlabel("position of the guess")
    axes.set_ylim(0, 1.05)
    axes.set_xticks(range(1, most + 1, 1 + most // 16))
