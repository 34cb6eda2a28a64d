"""Tokens a second over the last seconds."""

from __future__ import annotations

import pytest
from support.clocks.manual_clock import ManualClock
from support.daemon.serving_parts import finished, tokens

from machd.served.throughput import Throughput


def test_without_tokens_there_is_no_speed() -> None:
    """Zero, also when other things happen."""
    throughput = Throughput(ManualClock())
    throughput.on_events([finished("s")])
    assert throughput.tokens_per_s == 0.0


def test_a_steady_stream_is_measured() -> None:
    """Twenty tokens a second, after four seconds and after forty."""
    clock = ManualClock()
    throughput = Throughput(clock)
    for steps in (8, 72):
        for _ in range(steps):
            throughput.on_events(tokens("s", "x" * 10))
            clock.advance(0.5)
        assert throughput.tokens_per_s == pytest.approx(20.0, rel=0.06)


def test_what_was_long_ago_is_forgotten() -> None:
    """Ten idle seconds later nothing is left."""
    clock = ManualClock()
    throughput = Throughput(clock)
    throughput.on_events(tokens("s", "x" * 100))
    assert throughput.tokens_per_s == 100.0
    clock.advance(5)
    assert throughput.tokens_per_s == 20.0
    clock.advance(5.1)
    assert throughput.tokens_per_s == 0.0
