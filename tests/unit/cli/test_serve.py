"""What ``machd serve`` says when it is ready."""

from __future__ import annotations

from support.engines.fake_engine import FakeEngine

from machd.cli.serve import welcome
from machd.installed import command_name


def test_operators_are_told_where_they_are_answered() -> None:
    """The admin address in a line of its own, and none where the admin API is off."""
    line = f"  operators        http://127.0.0.1:8081 ({command_name()} ctl status)\n"
    told = welcome("http://127.0.0.1:8080", "http://127.0.0.1:8081", FakeEngine(), None)
    assert line in told
    assert welcome("http://127.0.0.1:8080", None, FakeEngine(), None) == told.replace(line, "")
