"""The bounds around code that reads a stranger's files."""

from __future__ import annotations

import contextlib
import signal
import sys
import time

import pytest

from machd.engine.backend.inspection_bounds import bounded
from machd.errors import ModelFormatError


def test_limits_hold_and_are_taken_back() -> None:
    """Too long and too large end in an error, and afterwards both are allowed again."""
    with (
        pytest.raises(ModelFormatError, match="longer than"),
        bounded("a loop", seconds=0.2, memory_bytes=1 << 30),
    ):
        _loop_forever()
    if sys.platform.startswith("linux"):
        with (
            pytest.raises(ModelFormatError, match="MiB"),
            bounded("a list", seconds=30, memory_bytes=64 << 20),
        ):
            bytearray(1 << 30)
    assert len(bytearray(1 << 28)) == 1 << 28


def test_no_handler_outlasts_the_limit() -> None:
    """Code that catches every Exception, or once everything, is ended, and its timer with it."""

    def catch_exceptions() -> None:
        while True:
            with contextlib.suppress(Exception):
                _loop_forever()

    def catch_everything_once() -> None:
        with contextlib.suppress(BaseException):
            _loop_forever()
        _loop_forever()

    for stubborn in (catch_exceptions, catch_everything_once):
        with (
            pytest.raises(ModelFormatError, match="longer than"),
            bounded("a loop", seconds=0.2, memory_bytes=1 << 30),
        ):
            stubborn()
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "the timer does not go on"


def _loop_forever() -> None:
    while True:
        pass


def test_limit_counts_the_blocks_own_processor_time() -> None:
    """A block that waits while other work has the processor is not ended; one that waits forever is."""
    with bounded("a wait", seconds=0.1, memory_bytes=1 << 30):
        time.sleep(0.3)  # time: what a busy machine takes from a block
    began = time.monotonic()
    with (
        pytest.raises(ModelFormatError, match="longer than"),
        bounded("a wait", seconds=0.1, memory_bytes=1 << 30),
    ):
        time.sleep(60)
    assert time.monotonic() - began < 30
