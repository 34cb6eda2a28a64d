"""The figures of guesses as a person sees them."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from unit.bench.bench_reports import made_report
from unit.bench.speculation_samples import made_speculation

from machd.bench.report import BenchReport
from machd.bench.speculation.counters import DraftCounters
from machd.bench.speculation.figures import SpeculationFigures
from machd.bench.speculation.plot import write_speculation_plot
from machd.bench.table import ReportPrinter

LARGE = DraftCounters(
    *(123_456, 98_765, dict.fromkeys(range(1, 65), 4096), dict.fromkeys(range(1, 65), 4095)),
    *(43_210, 9),
)


def report_of(figures: SpeculationFigures) -> BenchReport:
    """A report of nothing else."""
    return msgspec.structs.replace(
        made_report(),
        **{name: [] for name in ("levels", "ceilings", "staggered", "long_prompt")},
        **{name: [] for name in ("coalescing", "structured", "prefix", "guarantees")},
        speculation=figures,
    )


def printed(figures: SpeculationFigures) -> list[str]:
    """The lines that a pipe gets."""
    stream = io.StringIO()
    ReportPrinter(Console(file=stream, width=80)).finish(report_of(figures))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("slowness", [0.001, 1.0, 500.0])
def test_the_tables_fit_80_columns(slowness: float) -> None:
    """Nothing is cut off and no row is broken, with large counts and 64 positions in it."""
    lines = printed(made_speculation(slowness, counters=LARGE))

    assert max(len(line) for line in lines) <= 80
    assert not any("…" in line for line in lines)
    rows = [line for line in lines if line.startswith(("quote", "edit", "prose"))]
    assert len(rows) == 4 * 3 + 9
    assert rows[0].endswith("2.50 x   PASS")
    assert len(rows[9].split()) == 1 + 8


def test_every_goal_stands_by_its_figure() -> None:
    """The ratio, where half of the rounds lie, the goal, and whether it is reached."""
    text = " ".join(" ".join(printed(made_speculation())).split())

    assert "Guessing ahead, auto (so ngram), against off: 64 tokens an answer, 3 rounds" in text
    assert "quote 16.7 50.0 3.00 x 2.97 to 3.06 2.50 x PASS" in text
    assert "to 1.53 1.60 x MISSED" in text
    assert "prose 16.7 16.7 1.00 x 0.99 to 1.02 0.98 x PASS" in text
    assert "quote 540 405 75% 90 3.25 0 9 of 9" in text
    assert "quote 90% 89% 75%" in text
    assert "quote, letter 10 3.00 x 180 135 75% 3.25 3 of 3" in text
    assert text.count("note:") == 1, "that of the sample's server alone"


def test_what_the_rounds_do_not_show_is_said() -> None:
    """Rounds on both sides of a goal, and too few of them."""
    apart = " ".join(" ".join(printed(made_speculation(rounds=(0.9, 1.1, 1.0)))).split())
    few = " ".join(" ".join(printed(made_speculation(rounds=(1.0,)))).split())

    assert "prose 16.7 16.7 1.00 x 0.95 to 1.05 0.98 x NOT SHOWN" in apart
    assert "ask for more --speculation-rounds" in apart
    assert few.count("NOT SHOWN") == 3
    assert "goals are judged from 3 rounds on" in few


def test_nothing_guessed_is_told_with_its_reason() -> None:
    """Ratios of about 1 are then no wonder."""
    nothing = made_speculation(counters=DraftCounters(0, 0, {}, {}, 0, 0))
    off = msgspec.structs.replace(nothing, active_mode="off", reason="the caches cannot be cut")
    text = " ".join(" ".join(printed(off)).split())

    assert "auto (so off)" in text
    assert "note: nothing was guessed: the caches cannot be cut" in text
    assert "quote 0 0 - 0 1.00 0 9 of 9" in text
    assert "by position" not in text


def test_texts_that_differ_are_told() -> None:
    """How many, in the table and in a note."""
    figures = made_speculation()
    quote, *others = figures.workloads
    quote = msgspec.structs.replace(quote, different_texts=2)
    text = " ".join(
        " ".join(printed(msgspec.structs.replace(figures, workloads=[quote, *others]))).split()
    )

    assert "7 of 9" in text
    assert "note: 2 of 27 answers differ with and without guesses" in text


def test_a_daemon_that_does_not_count_leaves_cells_empty() -> None:
    """Its speed is told all the same."""
    text = " ".join(" ".join(printed(made_speculation(counters=None))).split())

    assert "quote - - - - - - 9 of 9" in text
    assert "by position" not in text
    assert "nothing was guessed" not in text


def test_the_report_is_json_and_comes_back() -> None:
    """Every field, unrounded."""
    report = report_of(made_speculation())
    data = msgspec.json.decode(msgspec.json.encode(report))

    assert msgspec.convert(data, BenchReport) == report
    assert data["speculation"]["workloads"][0]["verdict"] == "PASS"


@pytest.mark.parametrize("counters", [LARGE, None])
def test_the_plot_is_a_picture(tmp_path: Path, counters: DraftCounters | None) -> None:
    """With guesses that were counted and without, it comes out as a PNG of some size."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "speculation.png"
    write_speculation_plot(report_of(made_speculation(counters=counters)), path)
    data = path.read_bytes()

    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > height > 300
