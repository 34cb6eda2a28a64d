"""Results of a measurement beside the daemon are polled once a second, however busy it is."""

from __future__ import annotations

from structlog.testing import capture_logs
from support.clocks.manual_clock import ManualClock
from support.engines.fake_engine import FakeEngine

from machd.capabilities.evidence import Outcome, ProbeResult, Results
from machd.engine.protocol.engine import Engine
from machd.engine_process.startup_guard import NothingToMeasure, ProbeNews

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


def test_probe_news_polls_once_a_second_until_the_measurement_ends() -> None:
    """The first poll comes a second after the start, and none after the end."""
    clock, probe = ManualClock(), _Beside(FIRST, LAST)
    news = ProbeNews(probe, clock)
    engine = FakeEngine()
    seen = []
    for _ in range(12):
        seen.append(news.poll(engine))
        clock.advance(0.5)
    assert [one for one in seen if one is not None] == [FIRST, LAST]
    assert seen[:3] == [None, None, FIRST]
    assert probe.count == 3


def test_probe_news_logs_the_end_of_a_measurement() -> None:
    """One line has the last counts and the duration; without a measurement there is none."""
    for results, expected in (((FIRST, LAST), [2]), ((), [])):
        clock = ManualClock()
        news = ProbeNews(_Beside(*results), clock)
        with capture_logs() as lines:
            for _ in range(6):
                news.poll(FakeEngine())
                clock.advance(1)
        assert [one["passed"] for one in lines if one["event"] == "probe.finished"] == expected
