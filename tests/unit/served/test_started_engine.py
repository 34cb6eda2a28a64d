"""An engine process is started with a link, a log and a pipe for what is no log."""

from __future__ import annotations

import sys
import threading
from typing import NoReturn

import psutil
import pytest
from support.clocks.polling import CEILING_S

from machd.served.started_engine import StartedEngine

_WRITES = """
import os, socket, sys
link, log = map(int, sys.argv[1:])
os.write(log, b"an event\\n")
os.write(2, b"a crash\\n")
"""


def _started(code: str) -> StartedEngine:
    return StartedEngine([sys.executable, "-c", code], "{}")


def test_a_process_logs_to_the_front_and_crashes_into_a_pipe(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Both are written to the front's standard error; the log is not among the last lines."""
    started = _started(_WRITES)
    started.process.wait(CEILING_S)
    lines = started.error_output.last_lines(CEILING_S)
    started.frames.close()

    assert lines == ("a crash",)
    assert capfd.readouterr().err == "an event\na crash\n"


def test_what_is_opened_for_a_process_that_cannot_be_started_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether there is no room for it, or for the thread that reads its standard error."""

    def refuse(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="No such file"):
        StartedEngine(["/nowhere/python"], "{}")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="temporarily unavailable"):
        _started("import signal; signal.pause()")

    assert psutil.Process().num_fds() == before
