"""The only reader of time, and the clock that tests own."""

from __future__ import annotations

import datetime as dt

import pytest
from support.clocks.manual_clock import ManualClock

from machd.clock import Clock, SystemClock, Throttle


def test_monotonic_time_never_goes_back() -> None:
    """Each reading of the machine's clock is at least the one before."""
    clock: Clock = SystemClock()
    readings = [clock.monotonic_s() for _ in range(1000)]
    assert readings == sorted(readings)


def test_unix_time_is_the_time_that_people_use() -> None:
    """The wall reading is seconds since 1970 in UTC."""
    now_s = dt.datetime.now(dt.UTC).timestamp()
    assert SystemClock().unix_s() == pytest.approx(now_s, abs=60)


def test_manual_clock_stands_still_until_it_is_moved() -> None:
    """Both readings change by exactly what a test asks for, and by nothing else."""
    clock: Clock = (manual := ManualClock(5.0))
    assert (clock.monotonic_s(), clock.unix_s()) == (5.0, 5.0)

    manual.advance(2.5)
    manual.advance(0.0)

    assert (clock.monotonic_s(), clock.unix_s()) == (7.5, 7.5)


def test_manual_clock_does_not_go_back() -> None:
    """Moving time backwards is a mistake of the test."""
    with pytest.raises(AssertionError, match="time does not go back"):
        ManualClock().advance(-1.0)


def test_throttle_allows_one_line_in_an_interval() -> None:
    """The first line is due at once, the next one an interval after the last that was logged."""
    clock = ManualClock()
    throttle = Throttle(clock, interval_s=60)

    due = []
    for _ in range(6):
        due.append(throttle.is_due())
        clock.advance(25)

    assert due == [True, False, False, True, False, False]
