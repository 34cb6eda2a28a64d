"""Measuring a model that is served already, whatever the settings say of its start."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs
from support.clocks.manual_clock import ManualClock
from support.engines.fake_engine import FakeEngine
from support.schedulers.sequence_samples import LIMITS, request_of

from machd.capabilities.evidence import Outcome, ProbeResult
from machd.engine.protocol.engine import Engine
from machd.engine_process.startup_guard import (
    Measure,
    Measures,
    OnStart,
    StartupGuard,
    nothing_known,
)
from machd.errors import FaultError
from machd.scheduler.config import single_flight
from machd.scheduler.scheduler import Scheduler

FOUND = (ProbeResult("batch_parity", Outcome.PASSED),)


def _guard(measure: Measure, on_start: OnStart = OnStart.AUTO) -> StartupGuard:
    return StartupGuard(
        on_start=on_start,
        is_batching_asked=False,
        measures=Measures(measure_anew=measure),
        clock=ManualClock(0.0),
    )


@pytest.mark.parametrize("on_start", list(OnStart))
def test_it_measures_although_a_start_would_not(on_start: OnStart) -> None:
    """Neither ``probe.on_start`` nor batching being off keep an operator from an answer."""
    guard, engine = _guard(lambda _engine: FOUND, on_start), FakeEngine()
    with capture_logs():
        assert guard(engine) is None
        assert guard.remeasure(engine) == FOUND


def test_finding_nothing_is_an_answer() -> None:
    """Where there is nothing to run, nothing failed."""
    with capture_logs():
        assert _guard(nothing_known).remeasure(FakeEngine()) is None


@pytest.mark.parametrize("error", [OSError("planted"), SystemExit(1)], ids=["error", "exit"])
def test_a_failure_is_told_logged_and_leaves_no_rows(error: BaseException) -> None:
    """The caller gets a machd error; an interrupted probe leaves no rows in the engine."""

    def measure(engine: Engine) -> tuple[ProbeResult, ...]:
        scheduler = Scheduler(single_flight(LIMITS))
        scheduler.submit((request_of("probe"),), 0.0)
        scheduler.admit(0.0)
        engine.run(scheduler.plan())
        raise error

    engine = FakeEngine()
    with capture_logs() as logged, pytest.raises(FaultError, match="still holds"):
        _guard(measure).remeasure(engine)
    assert engine.memory().kv_used_bytes == 0
    assert [one["event"] for one in logged] == ["probe.started", "probe.failed"]
