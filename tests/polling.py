"""Waiting for something that will be true soon, and saying what it was when it never is."""

from __future__ import annotations

import time
from collections.abc import Callable

from machd.clock import SystemClock

__all__ = ["wait_until"]

_INTERVAL_S = 0.005


def wait_until(condition: Callable[[], bool], what: str, *, within_s: float = 30.0) -> None:
    """Return as soon as ``condition`` holds; fail with ``what`` when it does not in time."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + within_s
    while not condition():
        assert clock.monotonic_s() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(_INTERVAL_S)
