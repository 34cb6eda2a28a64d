"""A started engine process, as its front holds it."""

from __future__ import annotations

import sys
import threading
from typing import NoReturn

import pytest

from machd.served.engine_process import EngineProcess
from machd.served.started_engine import StartedEngine

_WAITS = (sys.executable, "-c", "import signal; signal.pause()")


def test_a_process_ends_when_there_is_no_room_for_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if it had not been started."""

    def refuse(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    started = StartedEngine(_WAITS, "{}")
    monkeypatch.setattr(threading.Thread, "start", refuse)

    with pytest.raises(OSError, match="temporarily unavailable"):
        EngineProcess(started)

    assert started.process.returncode == -9
