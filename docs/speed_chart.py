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

_COLORS = {"llama.cpp": "#0b57a4", "mlx_lm.server": "#8a94a3", "vllm-mlx": "#c0c7d1"}
_INK = "#1c2230"
_GROUP_WIDTH = 0.82
"""Of the distance between two numbers of streams, what their bars take."""


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of docs/speed.json: the figures, and what they were measured on.

    Attributes:
        measured_on: A date, as ISO 8601 spells it.
        versions: Of each server.
        method: How the figures were taken, in sentences.
        source: The page with all of the figures, relative to the repository's root.
        streams: Numbers of open streams, of each list below.
        machd_tokens_per_s: Of all streams together.
        times_as_fast_as: Of each other server, machd's tokens/s over its own in the same rounds.
    """

    model: str
    machine: str
    measured_on: str
    versions: dict[str, str]
    method: str
    source: str
    streams: list[int]
    machd_tokens_per_s: list[float]
    times_as_fast_as: dict[str, list[float]]


def kept_speed() -> Speed:
    """Read docs/speed.json."""
    return msgspec.json.decode(SPEED_PATH.read_bytes(), type=Speed)


def speed_chart_svg() -> str:
    """The chart as an SVG with a white ground: a group of bars for each number of streams, a bar for each server."""
    speed = kept_speed()
    with mpl.rc_context(
        {"svg.hashsalt": "machd", "svg.fonttype": "path", "font.size": 9.5, "text.color": _INK}
    ):
        figure = Figure(figsize=(8.4, 3.1), layout="constrained")
        _draw_bars(figure.subplots(), speed)
        figure.supxlabel(f"{speed.model}; {speed.machine}; {speed.measured_on}", fontsize=8)
        return _svg(figure)


def _draw_bars(axes: Axes, speed: Speed) -> None:
    """Draw how many times as fast machd is as each server, its figure above the bar, and a line where both are equal."""
    width = _GROUP_WIDTH / len(speed.times_as_fast_as)
    for place, (server, ratios) in enumerate(speed.times_as_fast_as.items()):
        left = place * width - _GROUP_WIDTH / 2
        bars = axes.bar(
            [group + left for group in range(len(speed.streams))],
            ratios,
            width * 0.94,
            align="edge",
            label=server,
            color=_COLORS[server],
        )
        axes.bar_label(
            bars, labels=[f"{one:.2f} \u00d7" for one in ratios], padding=2, fontsize=8.5
        )
    axes.axhline(1, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(
        "as fast",
        (len(speed.streams) - 0.55, 1),
        xytext=(2, 2),
        textcoords="offset points",
        fontsize=8,
    )
    axes.set_title("machd's tokens/s over another server's", fontsize=9.5, loc="left")
    axes.set_xticks(
        range(len(speed.streams)),
        [f"{one} stream" if one == 1 else f"{one} streams" for one in speed.streams],
    )
    axes.set_xlim(-0.5, len(speed.streams) - 0.25)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_yticks([])
    axes.legend(title="over", frameon=False, fontsize=8.5, loc="upper right")


def _svg(figure: Figure) -> str:
    """The figure's SVG, without the date and the program's version, with no space at a line's end."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n"
