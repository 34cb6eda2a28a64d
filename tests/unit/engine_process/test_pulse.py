"""The heartbeat: how old it is, and what a measurement may take."""

from __future__ import annotations

import pytest
from support.clocks.manual_clock import ManualClock

from machd.engine_process.loop_snapshot import Pulse


def test_it_ages_until_the_next_beat() -> None:
    """Seconds since the last one."""
    clock = ManualClock(5.0)
    pulse = Pulse(clock)
    clock.advance(3.0)
    assert pulse.age_s == 3.0
    pulse.beat()
    assert pulse.age_s == 0.0


def test_a_measurement_may_take_two_minutes() -> None:
    """Only what goes beyond that counts; when it is over, failed or not, the pulse is fresh."""
    clock = ManualClock(0.0)
    pulse = Pulse(clock)

    @pulse.measurement()
    def measure() -> None:
        clock.advance(119.0)
        assert pulse.age_s == 0.0
        clock.advance(31.0)
        assert pulse.age_s == 30.0
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        measure()
    assert pulse.age_s == 0.0
    clock.advance(2.0)
    assert pulse.age_s == 2.0
