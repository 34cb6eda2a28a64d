"""What is said while prompts are warmed, where no terminal shows a bar."""

from __future__ import annotations

import time

import pytest
from polling import wait_until

from machd.cli.ctl_wait import Countdown


def test_what_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines on standard error, each when it says something new; standard output stays the answer's."""
    monkeypatch.setattr("machd.cli.ctl_wait._SAY_EVERY_S", 0.02)
    said = ""

    def has_said(line: str) -> bool:
        nonlocal said
        captured = capsys.readouterr()
        assert captured.out == ""
        said += captured.err
        return line in said

    with Countdown("prompts", total=3) as shown:
        shown.advance()
        wait_until(lambda: has_said("1 of 3 prompts\n"), "the first is said")
        shown.advance()
        wait_until(lambda: has_said("2 of 3 prompts\n"), "the second is said")
        time.sleep(0.1)
    assert said.splitlines() == ["1 of 3 prompts", "2 of 3 prompts"]


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a bar nor a line before two seconds are over."""
    with Countdown("prompts", total=1) as shown:
        shown.advance()
    assert capsys.readouterr() == ("", "")
