"""Draw the README's chart of speed beside other servers from docs/speed.json.

The figures are those of docs/internals/performance.md. The same figures give the same bytes, so that
``docs/generate.py --check`` notices a chart that is not drawn from them.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SPEED_PATH = Path(__file__).with_name("speed.json")

_COLORS = {
    "machd": "#0b57a4",
    "llama.cpp": "#8a94a3",
    "mlx_lm.server": "#aab3bf",
    "vllm-mlx": "#c9d0d9",
}
_INK = "#1c2230"
_GROUP_WIDTH = 0.82
"""Of the distance between two numbers of streams, what their bars take."""


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Servers that were measured in turns, with the same prompts.

    Attributes:
        title: Above the panel.
        prompt_tokens: Of each request.
        tokens_per_s: Of each server, of all streams together, by number of streams.
    """

    title: str
    prompt_tokens: int
    tokens_per_s: dict[str, list[float]]


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What docs/speed.json holds: the figures, and what they were measured on.

    Attributes:
        measured_on: A date, as ISO 8601 spells it.
        versions: Of each server.
        method: How the figures were taken, in sentences.
        source: The page with all of the figures, relative to the repository's root.
        streams: Numbers of open streams, of each run.
    """

    model: str
    machine: str
    measured_on: str
    versions: dict[str, str]
    method: str
    source: str
    streams: list[int]
    runs: list[Run]


def kept_speed() -> Speed:
    """Read docs/speed.json."""
    return msgspec.json.decode(SPEED_PATH.read_bytes(), type=Speed)


def speed_chart_svg() -> str:
    """The chart as an SVG with a white ground: one panel a run, one group of bars a number of streams."""
    speed = kept_speed()
    with mpl.rc_context(
        {"svg.hashsalt": "machd", "svg.fonttype": "path", "font.size": 9.5, "text.color": _INK}
    ):
        figure = Figure(figsize=(8.4, 3.1), layout="constrained")
        panels = figure.subplots(
            1,
            len(speed.runs),
            sharey=True,
            width_ratios=[len(run.tokens_per_s) for run in speed.runs],
        )
        for axes, run in zip(panels, speed.runs, strict=True):
            _draw_run(axes, run, speed.streams)
        panels[0].set_ylabel("tokens/s, all streams", color=_INK)
        figure.supxlabel(f"{speed.model}; {speed.machine}; {speed.measured_on}", fontsize=8)
        return _svg(figure)


def _draw_run(axes: Axes, run: Run, streams: list[int]) -> None:
    """Draw the bars of one run, each with its figure above it."""
    width = _GROUP_WIDTH / len(run.tokens_per_s)
    for place, (server, figures) in enumerate(run.tokens_per_s.items()):
        left = place * width - _GROUP_WIDTH / 2
        bars = axes.bar(
            [group + left for group in range(len(streams))],
            figures,
            width * 0.94,
            align="edge",
            label=server,
            color=_COLORS[server],
        )
        axes.bar_label(bars, labels=[f"{one:.0f}" for one in figures], padding=2, fontsize=8.5)
    axes.set_title(run.title, fontsize=9.5, loc="left")
    axes.set_xticks(
        range(len(streams)), [f"{one} stream" if one == 1 else f"{one} streams" for one in streams]
    )
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_yticks([])
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")


def _svg(figure: Figure) -> str:
    """The figure's SVG, without the date and the program's version, with no space at a line's end."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n"
