"""Waiting for something that will be true soon, and saying what was seen when it never is."""

from __future__ import annotations

import time
from collections.abc import Callable

from machd.clock import SystemClock

CEILING_S = 300.0
"""The longest that a test waits for anything, in seconds.

It ends a test that hangs and judges nothing: a machine that is busy with other work needs many times
what a quiet one needs. Tests name no other number of seconds to wait (docs/test_waiting.py).
"""

_INTERVAL_S = 0.005
_MAX_INTERVAL_S = 0.02
_SHARE = 1 / 20
"""Of the time waited so far: a look is often a request to a daemon that is starting, and needs the processor itself."""


def wait_until(
    condition: Callable[[], bool], what: str, *, seen: Callable[[], object] | None = None
) -> None:
    """Return as soon as ``condition`` holds.

    Raises:
        AssertionError: ``CEILING_S`` have passed. It says ``what`` was waited for, and what ``seen``
            returns then.
    """
    clock = SystemClock()
    started_s = clock.monotonic_s()
    while not condition():
        waited_s = clock.monotonic_s() - started_s
        if waited_s >= CEILING_S:
            last = "" if seen is None else f"; last seen: {seen()!r}"
            raise AssertionError(f"not within {CEILING_S:g} s: {what}{last}")
        time.sleep(min(max(_INTERVAL_S, waited_s * _SHARE), _MAX_INTERVAL_S))
