"""What is reported when, by a clock that tests own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import wait_until
from support.daemon.engine_thread import ScriptedScheduling
from support.engines.fake_engine import FakeEngine
from support.programs.notify_socket import NotifySocket

from machd.engine_process.loop import EngineLoop
from machd.generations.fanout import Fanout
from machd.process.configuration import Configuration
from machd.process.lifecycle import Lifecycle, State
from machd.process.notify import ServiceNotifier
from machd.process.service_report import ServiceReport
from machd.served.throughput import Throughput
from machd.settings.model import Settings
from machd.settings.sources import SettingsSources

_WATCHDOG_S = 40.0


class _Counts:
    """Those of one engine."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop

    @property
    def running_count(self) -> int:
        return self._loop.snapshot.running_count

    @property
    def waiting_count(self) -> int:
        return self._loop.snapshot.waiting_count

    @property
    def slot_count(self) -> int:
        return self._loop.snapshot.slot_count

    @property
    def heartbeat_age_s(self) -> float:
        return self._loop.heartbeat_age_s


class _Reported:
    """A report on an engine whose thread never runs, so that its heartbeat is its start."""

    def __init__(self, ear: NotifySocket) -> None:
        self.clock = ManualClock()
        self.ear = ear
        self.lifecycle = Lifecycle()
        sources = SettingsSources(None, {}, {})
        fanout = Fanout(asyncio.get_running_loop())
        loop = EngineLoop(
            load=FakeEngine,
            scheduling=ScriptedScheduling(),
            settings=Settings(),
            publish=fanout.publish,
            clock=self.clock,
        )
        environ = {
            "NOTIFY_SOCKET": ear.path,
            "WATCHDOG_USEC": str(round(_WATCHDOG_S * 1_000_000)),
        }
        self.notifier = ServiceNotifier(environ, self.clock)
        self.report = ServiceReport(
            self.notifier,
            configuration=Configuration(
                sources, sources.load(), lambda _settings: lambda: None, self.clock
            ),
            lifecycle=self.lifecycle,
            models=_Counts(loop),
            open_requests=lambda: 0,
            throughput=Throughput(self.clock),
            clock=self.clock,
        )

    def heard(self, name: str) -> int:
        """Return how often it was said by now; the last of it has arrived."""
        marks = self.ear.values("STATUS").count("mark")
        self.notifier.status("mark")
        wait_until(lambda: self.ear.values("STATUS").count("mark") > marks, "the mark is heard")
        return len(self.ear.values(name))


@pytest.fixture(name="reported")
async def _reported() -> AsyncIterator[_Reported]:
    with NotifySocket() as ear:
        reported = _Reported(ear)
        yield reported
        reported.notifier.close()


async def test_a_model_may_load_for_an_hour_and_no_longer(reported: _Reported) -> None:
    """More time is asked for again and again, long before it is over, and at last no more."""
    for _ in range(1200):
        reported.report.look()
        reported.clock.advance(5)
    count = reported.heard("EXTEND_TIMEOUT_USEC")
    extension_s = int(reported.ear.values("EXTEND_TIMEOUT_USEC")[0]) / 1_000_000
    assert 3600 / (extension_s / 2) <= count <= 3600 / 5 + 1


async def test_signs_of_life_come_each_quarter_until_the_engine_is_late(
    reported: _Reported,
) -> None:
    """The heartbeat stands still: there are signs for half of the interval, then none."""
    reported.lifecycle.become(State.READY)
    reported.report.ready()
    counts = []
    for _ in range(2):
        for _ in range(50):
            reported.clock.advance(_WATCHDOG_S / 100)
            reported.report.look()
        counts.append(reported.heard("WATCHDOG"))
    assert 2 <= counts[0] <= 3
    assert counts[1] == counts[0]


async def test_nothing_lives_before_it_is_ready(reported: _Reported) -> None:
    """The watchdog runs from READY on; loading has a timeout of its own."""
    reported.report.look()
    assert reported.heard("WATCHDOG") == 0


async def test_reloads_are_told_between_ready_and_stopping_only(reported: _Reported) -> None:
    """While it starts or stops the service manager waits for something else."""
    reported.report.reloading()
    reported.report.reloaded()
    assert reported.heard("RELOADING") == reported.heard("READY") == 0

    reported.lifecycle.become(State.READY)
    reported.report.ready()
    reported.report.reloading()
    reported.report.reloaded()
    reported.lifecycle.become(State.DRAINING)
    reported.report.stopping()
    reported.report.reloading()
    reported.report.reloaded()
    assert reported.heard("RELOADING") == 1
    assert reported.heard("READY") == 2


async def test_an_operators_drain_is_no_stop(reported: _Reported) -> None:
    """Draining shows in the status; STOPPING is for good and is said by a stop alone."""
    reported.lifecycle.become(State.READY)
    reported.report.ready()
    reported.lifecycle.become(State.DRAINING)
    reported.clock.advance(1)
    reported.report.look()
    assert reported.heard("STOPPING") == 0
    assert "draining, 0 requests open" in reported.ear.values("STATUS")


async def test_the_status_changes_once_a_second_at_most(reported: _Reported) -> None:
    """What changes more often is told a second later."""
    reported.report.look()
    reported.lifecycle.become(State.READY)
    reported.report.look()
    reported.clock.advance(1)
    reported.report.look()
    reported.report.look()
    assert reported.heard("STATUS") == 3  # the mark is the third
    assert reported.ear.values("STATUS")[1].endswith("0 waiting, 0 tokens/s")
