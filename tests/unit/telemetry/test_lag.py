"""How late the event loop wakes up."""

from __future__ import annotations

import asyncio

import pytest
from support.clocks.manual_clock import ManualClock

from machd.telemetry.lag import EventLoopLag


@pytest.mark.parametrize(("overslept_s", "lag_s"), [(0.25, 0.25), (0.0, 0.0), (-0.1, 0.0)])
async def test_lag_is_what_a_sleep_took_too_long(
    monkeypatch: pytest.MonkeyPatch, overslept_s: float, lag_s: float
) -> None:
    """The last measurement counts, and waking early (clocks are coarse) is no negative lag."""
    clock = ManualClock()
    naps: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds_s: float) -> None:
        naps.append(seconds_s)
        clock.advance(seconds_s + (9.0 if len(naps) == 1 else overslept_s))
        await real_sleep(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    watcher = EventLoopLag(clock)
    assert watcher.last_s == 0.0
    watching = asyncio.create_task(watcher.watch())
    while len(naps) < 3:
        await real_sleep(0)
    watching.cancel()

    assert watcher.last_s == pytest.approx(lag_s)
