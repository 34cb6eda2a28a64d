"""Errors of tests say what the daemons of the test logged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from support.daemon.daemon_reports import daemon_reports, reported
from support.daemon.running_daemon import RunningDaemon


@dataclass
class _EndedDaemon:
    url: str = "http://127.0.0.1:9"  # nobody listens on the port of the discard protocol

    def log_tail(self, lines: int) -> Sequence[str]:
        """Its last lines."""
        return [f"line {number}" for number in range(100)][-lines:]


def test_an_error_has_the_end_of_the_log_as_a_note() -> None:
    """An error that leaves the block of a daemon names it, and holds its last log lines only."""
    with pytest.raises(AssertionError) as caught, reported(_EndedDaemon()):
        raise AssertionError("as planted")
    (note,) = caught.value.__notes__
    assert note.startswith("The daemon at http://127.0.0.1:9:\n  does not answer: ConnectError")
    assert note.endswith("log: line 99")
    assert "log: line 1\n" not in note


def test_an_error_has_the_state_of_a_daemon_that_answers() -> None:
    """The note holds what /health says, and how many requests run and wait."""
    with pytest.raises(AssertionError) as caught, RunningDaemon():
        raise AssertionError("as planted")
    (note,) = caught.value.__notes__
    assert "/health: 200" in note
    assert 'machd_requests_running{model="fake"} 0.0' in note


def test_only_running_daemons_are_reported() -> None:
    """A daemon is in the list from the beginning of its block to its end."""
    others = len(daemon_reports())
    with reported(_EndedDaemon()):
        assert len(daemon_reports()) == others + 1
    assert len(daemon_reports()) == others
