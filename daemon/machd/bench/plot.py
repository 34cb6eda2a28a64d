"""A report as a picture: first token and tokens/s against the number of clients."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machd.bench.figures import LevelFigures
from machd.bench.modes import STATIC
from machd.bench.report import BenchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (10.0, 4.4)
_DOTS_PER_INCH = 150
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Of Okabe and Ito: told apart with any kind of colour vision."""
GREY = "#666666"
_CEILING_STYLE: Mapping[str, Any] = {"linestyle": "--", "linewidth": 1.2, "color": GREY}
_LABELS = {STATIC.name: f"{STATIC.name} (no HTTP; first token with the batch's end)"}
_LOGARITHMIC_FROM = 20.0
"""Between the largest and the smallest of the values: above, a linear scale hides the small."""


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_plot(report: BenchReport, path: Path) -> None:
    """Draw a report into a PNG file; needs matplotlib."""
    with saved_figure(path, _SIZE_INCHES) as figure:
        _draw(figure, report)


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


def _draw(figure: Figure, report: BenchReport) -> None:
    first_token, throughput = figure.subplots(1, 2)
    for axes in (first_token, throughput):
        axes.margins(y=0.12)
    for colour, mode in zip(COLOURS, _modes(report), strict=False):
        levels = sorted(
            (level for level in report.levels if level.mode == mode),
            key=lambda level: level.concurrency,
        )
        label = _LABELS.get(mode, mode)
        _draw_first_token(first_token, levels, label, colour)
        _draw_line(throughput, levels, lambda level: level.generation_tps, label, colour)
    _draw_ceiling(throughput, report)
    first_token.set_title("Time to first token: median, and up to p90", loc="left", fontsize=11)
    first_token.set_ylabel("seconds")
    throughput.set_title("Generated tokens/s, all clients together", loc="left", fontsize=11)
    throughput.set_ylabel("tokens/s")
    throughput.set_ylim(bottom=0)
    _scale_first_token(first_token, report)
    for axes in (first_token, throughput):
        _finish(axes, sorted({level.concurrency for level in report.levels}))
    work = report.workload
    caption = f"{report_caption(report)}; {work.prompt_tokens} prompt tokens, {work.max_tokens} new"
    figure.suptitle(caption, fontsize=9, color=GREY, x=0.01, ha="left")


def _draw_first_token(axes: Axes, levels: list[LevelFigures], label: str, colour: str) -> None:
    _draw_line(axes, levels, lambda level: level.ttft.p50_s, label, colour)
    axes.fill_between(
        [level.concurrency for level in levels],
        [level.ttft.p50_s for level in levels],
        [level.ttft.p90_s for level in levels],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )


def _scale_first_token(axes: Axes, report: BenchReport) -> None:
    medians = [level.ttft.p50_s for level in report.levels]
    if max(medians) > _LOGARITHMIC_FROM * min(medians):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(bottom=0)


def _draw_line(
    axes: Axes,
    levels: list[LevelFigures],
    value: Callable[[LevelFigures], float],
    label: str,
    colour: str,
) -> None:
    axes.plot(
        [level.concurrency for level in levels],
        [value(level) for level in levels],
        marker="o",
        color=colour,
        label=label,
    )


def _draw_ceiling(axes: Axes, report: BenchReport) -> None:
    """The bare loop at every batch width; at one width alone it is a line across."""
    ceilings = report.ceilings
    if len(ceilings) == 1:
        axes.axhline(
            ceilings[0].generation_tps,
            **_CEILING_STYLE,
            label=f"bare loop at width {ceilings[0].batch_width}",
        )
    elif ceilings:
        axes.plot(
            [ceiling.batch_width for ceiling in ceilings],
            [ceiling.generation_tps for ceiling in ceilings],
            **_CEILING_STYLE,
            label="bare loop, as wide as there are clients",
        )


def _finish(axes: Axes, concurrencies: list[int]) -> None:
    axes.set_xlabel("clients")
    if len(concurrencies) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(concurrencies, [str(one) for one in concurrencies])
    axes.minorticks_off()
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _modes(report: BenchReport) -> list[str]:
    return list(dict.fromkeys(level.mode for level in report.levels))


def report_caption(report: BenchReport) -> str:
    """What was measured, and on what."""
    model, machine = report.model, report.machine
    parts = (model.id, model.dtype, model.blas, f"{machine.cpu}, {machine.cpu_count} CPUs")
    return ", ".join(part for part in parts if part)
