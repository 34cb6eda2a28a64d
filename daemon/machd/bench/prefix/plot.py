"""The prefix cache as a picture: a bar for each kind of prompt, how long until its first token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from machd.bench.plot import COLOURS, GREY, report_caption, saved_figure
from machd.bench.prefix.figures import PrefixFigures
from machd.bench.prefix.latency import PrefixLatencyFigures
from machd.bench.report import BenchReport
from machd.bench.statistics import Distribution

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (7.0, 4.2)
_BAR_SHARE = 0.8
_NAMES = ("cold", "prefix", "warm", "after a restart")


def write_prefix_plot(report: BenchReport, path: Path) -> None:
    """Draw what was measured of prefix caches into a PNG file; needs matplotlib."""
    with saved_figure(path, _SIZE_INCHES) as figure:
        axes = figure.subplots()
        for index, figures in enumerate(report.prefix):
            _draw_mode(axes, figures, index, len(report.prefix))
        latency = report.prefix[0].latency
        axes.set_title(
            f"Time to first token of {latency.prompt_tokens} prompt tokens: median, and up to p90",
            loc="left",
            fontsize=11,
        )
        axes.set_ylabel("seconds")
        axes.set_xticks(range(len(_NAMES)), _NAMES)
        axes.margins(y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
        if len(report.prefix) > 1:
            axes.legend(frameon=False)
        figure.suptitle(report_caption(report), fontsize=9, color=GREY, x=0.01, ha="left")


def _draw_mode(axes: Axes, figures: PrefixFigures, index: int, modes: int) -> None:
    """One bar of each kind, beside those of other modes; its share of cold on top of it."""
    latency, width = figures.latency, _BAR_SHARE / modes
    bars = [
        (place + (index - (modes - 1) / 2) * width, sample)
        for place, sample in enumerate(_samples(latency))
        if sample is not None
    ]
    medians = [sample.p50_s for _, sample in bars]
    drawn = axes.bar(
        [place for place, _ in bars],
        medians,
        width=width,
        yerr=([0.0] * len(bars), [sample.p90_s - sample.p50_s for _, sample in bars]),
        color=COLOURS[index],
        ecolor=GREY,
        label=figures.mode,
    )
    shares = [f"{median_s / latency.cold.p50_s:.1%}" for median_s in medians]
    axes.bar_label(drawn, labels=shares, fontsize=9, padding=2)


def _samples(latency: PrefixLatencyFigures) -> tuple[Distribution | None, ...]:
    """In the order of their names."""
    return (latency.cold, latency.prefix, latency.warm, latency.restarted)
