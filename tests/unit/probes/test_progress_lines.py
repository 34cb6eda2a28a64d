"""Long work in a pipe says now and then how far it is."""

from __future__ import annotations

import io

from rich.console import Console
from support.clocks.polling import wait_until

from machd.cli.progress import ProgressBar
from machd_probes.progress import ProgressLines


def test_a_pipe_gets_a_line_now_and_then() -> None:
    """Each line has the work's own words and the time so far."""
    stream = io.StringIO()
    lines = ProgressLines(Console(file=stream), lambda: "probing: 3 of 9", every_s=0.01)
    lines.start()
    try:
        wait_until(
            lambda: stream.getvalue().count("probing: 3 of 9, ") >= 2,
            "two lines",
            seen=stream.getvalue,
        )
    finally:
        lines.stop()


def test_a_terminal_gets_none() -> None:
    """There is a bar."""
    stream = io.StringIO()
    lines = ProgressLines(Console(file=stream, force_terminal=True), lambda: "x", every_s=0.0)
    lines.start()
    lines.stop()

    assert stream.getvalue() == ""


def test_a_bars_line_names_the_stage_and_its_size() -> None:
    """A stage without a size is named alone."""
    bar = ProgressBar()
    bar.stage("reading the model's files", None)
    assert bar._line() == "reading the model's files"
    bar.stage("loading", 540_000_000)
    bar.advance(230_000_000)
    assert bar._line() == "loading: 230 of 540 MB"
