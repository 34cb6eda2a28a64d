"""Draw the dashboard's main panels into ``docs/operating/panels.png``, from what Prometheus knows.

``PYTHONPATH=tests python docs/panels.py`` serves the embedded model, sends requests for two
minutes, scrapes it with a Prometheus of its own and draws that. With ``--url URL`` it draws what a
running Prometheus has of the last ``--minutes``. Queries are those of the dashboard itself.
"""

from __future__ import annotations

import argparse
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from pathlib import Path

import httpx
from dashboard.dashboard import DASHBOARD_ROWS
from dashboard.grafana import Panel
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image
from support.daemon.serve_process import ServeProcess
from support.programs.prometheus_server import PrometheusServer, query_range

from machd.clock import SystemClock

_OUT = Path(__file__).resolve().parent / "operating" / "panels.png"
_TITLES = (
    "Requests by how they ended",
    "Running and waiting",
    "Tokens a second",
    "Time to first token",
    "Between tokens",
    "Queue",
    "Rows and slots",
    "KV cache",
    "Aborts by reason",
)
_CLOCK = SystemClock()
_WINDOW = "20s"
"""Of rates: here it is scraped twice a second."""
_POINTS = 150
_SIZE_INCHES = (13.0, 8.4)
_DOTS_PER_INCH = 110
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""Of Okabe and Ito: told apart with any kind of colour vision."""
_GREY = "#666666"
_UNITS = {"reqps": "requests/s", "s": "seconds", "bytes": "", "cps": "a second", "short": ""}
_ARGUMENTS = (
    "--continuous-batching-enabled",
    "--continuous-batching-max-b=4",
    "--continuous-batching-kv-budget-gb=0.05",
    "--limits-max-queue=4",
    "--admin-listen=off",
)
_PHASES = ((2, 30.0), (5, 30.0), (12, 30.0), (3, 30.0))
"""How many clients there are, for how many seconds."""
_NONE_ANY_MORE = -1
_COLOURS_IN_FILE = 200


@dataclass(frozen=True, slots=True)
class Source:
    """A Prometheus, the time to draw, the window of rates, and what is known of the load.

    Attributes:
        marks: What began when, in seconds from the left edge.
    """

    url: str
    start_s: float
    end_s: float
    window: str
    marks: tuple[tuple[float, str], ...] = ()

    @property
    def duration_s(self) -> float:
        """From the left edge to the right."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel; times in seconds from the left edge."""

    label: str
    times_s: list[float]
    values: list[float]


def main() -> None:
    """Draw one or the other."""
    parser = argparse.ArgumentParser(description="Draw the dashboard's main panels.")
    parser.add_argument("--url", help="of a running Prometheus; without it one is started")
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back, with --url")
    parser.add_argument("--window", default="1m", help="of rates, with --url: a few scrapes")
    parser.add_argument("--out", type=Path, default=_OUT)
    options = parser.parse_args()
    if options.url is not None:
        end_s = _CLOCK.unix_s()
        start_s = end_s - options.minutes * 60
        draw(Source(options.url, start_s, end_s, options.window), options.out)
        return
    with a_daemon_at_work() as source:
        draw(source, options.out)


@contextmanager
def a_daemon_at_work() -> Iterator[Source]:
    """The embedded model after two minutes of requests, as a Prometheus saw it."""
    with (
        ServeProcess(*_ARGUMENTS) as daemon,
        PrometheusServer(daemon.url, interval="500ms") as prometheus,
    ):
        start_s = _CLOCK.unix_s()
        end_s = start_s + sum(duration_s for _, duration_s in _PHASES)
        ask(daemon.url)
        yield Source(prometheus.url, start_s, end_s, _WINDOW, _marks())


def _marks() -> tuple[tuple[float, str], ...]:
    starts_s = accumulate((duration_s for _, duration_s in _PHASES), initial=0.0)
    return tuple(
        (at_s, f"{clients} clients") for (clients, _), at_s in zip(_PHASES, starts_s, strict=False)
    )


def ask(url: str) -> None:
    """Chat with as many clients as each phase has; every fifth answer is left in the middle."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    wanted = {"clients": _PHASES[0][0]}
    most = max(clients for clients, _ in _PHASES)
    threads = [
        threading.Thread(target=_chat, args=(url, model, number, wanted)) for number in range(most)
    ]
    for one in threads:
        one.start()
    for clients, duration_s in _PHASES:
        print(f"{clients} clients for {duration_s:g} s")
        wanted["clients"] = clients
        time.sleep(duration_s)
    wanted["clients"] = _NONE_ANY_MORE
    for one in threads:
        one.join()


def _chat(url: str, model: str, number: int, wanted: Mapping[str, int]) -> None:
    turn = 0
    while wanted["clients"] != _NONE_ANY_MORE:
        if number >= wanted["clients"]:
            time.sleep(0.2)
            continue
        turn += 1
        body = {
            "model": model,
            "messages": [{"role": "user", "content": f"{number}.{turn}: tell me about the sea."}],
            "max_tokens": (8, 24, 16)[(number + turn) % 3],
            "stream": True,
        }
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            if answer.status_code == 429:
                time.sleep(0.5)
                continue
            answer.raise_for_status()
            for count, _ in enumerate(answer.iter_lines()):
                if (number + turn) % 5 == 0 and count > 10:
                    break


def draw(source: Source, out: Path) -> None:
    """Ask for every main panel and write the picture."""
    panels = {panel.title: panel for row in DASHBOARD_ROWS for panel in row.panels}
    figure = Figure(figsize=_SIZE_INCHES, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    FigureCanvasAgg(figure)
    for axes, title in zip(figure.subplots(3, 3).flat, _TITLES, strict=True):
        panel = panels[title]
        _draw_panel(axes, panel, list(_lines(source, panel)))
        _finish(axes, panel, source)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=_DOTS_PER_INCH, format="png")
    # Lines on white need few colours, and the file is part of the repository.
    Image.open(drawn).convert("RGB").quantize(_COLOURS_IN_FILE).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size // 1000} kB")


def _lines(source: Source, panel: Panel) -> Iterator[Line]:
    for query in panel.queries:
        expr = query.expr.replace("$__rate_interval", source.window)
        expr = expr.replace("$instance", ".*").replace("$model", ".*")
        for found in query_range(
            source.url,
            expr,
            start_unix_s=source.start_s,
            end_unix_s=source.end_s,
            step_s=source.duration_s / _POINTS,
        ):
            labels: dict[str, str] = found["metric"]
            label = re.sub(r"\{\{(\w+)\}\}", lambda match: labels[match[1]], query.legend)  # noqa: B023 - used at once
            values = [float(value) for _, value in found["values"]]
            if any(value > 0 for value in values) or len(panel.queries) > 1:
                yield Line(label, [at_s - source.start_s for at_s, _ in found["values"]], values)


def _draw_panel(axes: Axes, panel: Panel, lines: Sequence[Line]) -> None:
    for colour, line in zip(_COLOURS * 3, lines, strict=False):
        axes.plot(line.times_s, line.values, color=colour, linewidth=1.5, label=line.label)
        if panel.is_stacked:
            axes.fill_between(line.times_s, line.values, color=colour, alpha=0.12, linewidth=0)
    highest = max(
        (value for line in lines for value in line.values if not math.isnan(value)), default=0
    )
    axes.set_ylim(0, highest * 1.4 or 1)  # room for the legend
    if lines:
        axes.legend(fontsize=8, frameon=False, loc="upper left", ncols=4, columnspacing=1.0)


def _finish(axes: Axes, panel: Panel, source: Source) -> None:
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color="#222222")
    axes.set_xlim(0, source.duration_s)
    axes.set_ylabel(_UNITS[panel.unit], fontsize=8, color=_GREY)
    axes.xaxis.set_major_formatter(FuncFormatter(_clock))
    axes.xaxis.set_major_locator(MultipleLocator(30) if source.marks else MaxNLocator(6))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    if panel.unit == "bytes":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:g} MB"))
    axes.tick_params(labelsize=8, colors=_GREY)
    axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.7)
    for at_s, text in source.marks:
        axes.axvline(at_s, color="#bbbbbb", linewidth=0.8, linestyle=":")
        axes.text(
            at_s + 1.5, 0.84, text, transform=axes.get_xaxis_transform(), fontsize=7, color=_GREY
        )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#cccccc")


def _clock(seconds: float, _position: int) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


if __name__ == "__main__":
    main()
