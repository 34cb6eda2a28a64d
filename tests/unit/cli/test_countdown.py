"""While prompts are warmed a terminal shows a progress bar, and other outputs nothing."""

from __future__ import annotations

import io
import sys
import time

import pytest
from support.clocks.polling import wait_until

from machd.cli.ctl_wait import Countdown


class _Terminal(io.StringIO):
    """Keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it takes long, on standard error."""
    monkeypatch.setattr("machd.cli.ctl_wait._SAY_EVERY_S", 0.02)
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Countdown("prompts", total=30) as shown:
        shown.advance(16)
        wait_until(lambda: "16/30" in terminal.getvalue(), "it is shown")


def test_elsewhere_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written to a file, however long it takes."""
    monkeypatch.setattr("machd.cli.ctl_wait._SAY_EVERY_S", 0.02)
    with Countdown("prompts", total=3) as shown:
        shown.advance()
        time.sleep(0.2)
        shown.advance()
    assert capsys.readouterr() == ("", "")
