"""Results of probes beside the daemon are taken up while no request runs."""

from __future__ import annotations

from support.clocks.manual_clock import ManualClock
from support.engines.fake_engine import FakeEngine

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.engine.protocol.engine import Engine
from machd.serving.startup_guard import IdleProbe, NothingToMeasure, Results

FIRST = (ProbeResult("batch_parity", Outcome.PASSED),)
LAST = (*FIRST, ProbeResult("trim", Outcome.PASSED))


class _Beside(NothingToMeasure):
    """Knows more each time it is asked, and then nothing more."""

    def __init__(self, *news: Results) -> None:
        self.news = list(news)
        self.count = 0

    def measure_next(self, engine: Engine) -> Results:
        """The next of them."""
        del engine
        self.count += 1
        return self.news.pop(0) if self.news else None


def test_idle_probe_polls_until_the_measurement_is_over() -> None:
    """From a second of silence on, and never again after the end."""
    clock, probe = ManualClock(), _Beside(FIRST, LAST)
    idle = IdleProbe(probe, clock)
    engine = FakeEngine()

    assert idle.news(engine, is_idle=True) is None
    assert probe.count == 0, "a pause between two requests is no idle moment"
    clock.advance(1)
    assert idle.news(engine, is_idle=True) == FIRST
    assert idle.news(engine, is_idle=True) == LAST
    for _ in range(3):
        assert idle.news(engine, is_idle=True) is None
    assert probe.count == 3


def test_idle_probe_waits_while_requests_run() -> None:
    """A request restarts the second of idleness."""
    clock, probe = ManualClock(), _Beside(FIRST)
    idle = IdleProbe(probe, clock)
    engine = FakeEngine()
    for _ in range(5):
        assert idle.news(engine, is_idle=True) is None
        clock.advance(0.9)
        assert idle.news(engine, is_idle=False) is None
        clock.advance(0.9)
    assert probe.count == 0
