"""The order of ``machd bench --guarantees``: one daemon for requests, then one for every stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from machd.bench.collected import Collected, Subject
from machd.bench.guarantees.bodies import (
    Body,
    Refusal,
    bad_schemas,
    heavy_bodies,
    heavy_conversations,
    malformed_bodies,
)
from machd.bench.guarantees.cancellation import Cancellation
from machd.bench.guarantees.collector import CollectorDelay, CollectorStop
from machd.bench.guarantees.daemon import Daemon, Launcher
from machd.bench.guarantees.guarantee import Guarantee, measure
from machd.bench.guarantees.health import HealthBeside
from machd.bench.guarantees.stop import DrainStop, IdleStop
from machd.bench.modes import SINGLE
from machd.bench.plan import BenchPlan
from machd.bench.progress import BenchProgress
from machd.bench.report import BenchReport
from machd.bench.workload import Workload
from machd.clock import Clock

TRIES = 3

_Subject = TypeVar("_Subject")


def _refused_bodies(daemon: Daemon) -> list[Body]:
    model_id = daemon.target.model_id
    return malformed_bodies(model_id) + bad_schemas(model_id)


def _heaviest_bodies(daemon: Daemon) -> list[Body]:
    model_id = daemon.target.model_id
    conversations = heavy_conversations(model_id) if daemon.has_chat else []
    return heavy_bodies(model_id) + conversations


OF_REQUESTS: tuple[Guarantee[Daemon], ...] = (
    HealthBeside("/health beside bad bodies, p99", _refused_bodies),
    HealthBeside("/health beside 2 MB bodies, p99", _heaviest_bodies),
    Refusal("a malformed body is refused", 1.0, malformed_bodies),
    Refusal("a bad schema is refused", 1.0, bad_schemas),
    Refusal("a 2 MB body is answered", 5.0, heavy_bodies),
    Refusal("a 2 MB chat is answered", 5.0, heavy_conversations, needs_chat=True),
    Cancellation(),
)
"""Guarantees that are measured on one daemon, which keeps running."""

OF_STOPS: tuple[Guarantee[Launcher], ...] = (
    IdleStop(),
    DrainStop("SIGTERM ends streams, 2 s drain", 3.0, drain_s=2.0),
    DrainStop("a second SIGTERM ends a drain", 1.0, drain_s=3600.0, is_second=True),
    CollectorDelay(),
    CollectorStop(),
)
"""Guarantees of which each try starts a daemon."""


class GuaranteesBench:
    """One run. The figures are collected in here."""

    def __init__(
        self, workload: Workload, *, clock: Clock, progress: BenchProgress, tries: int = TRIES
    ) -> None:
        """Prepare a run.

        Args:
            workload: Its seed goes into the report.
            clock: Reads time.
            progress: Told how far the run is.
            tries: How often each guarantee is measured.
        """
        self._general = BenchPlan(workload, (1,))
        self._clock = clock
        self._progress = progress
        self._tries = tries
        self._collected = Collected(clock.unix_s())

    async def measure(self, serve_args: Sequence[str]) -> BenchReport:
        """Measure every guarantee.

        Args:
            serve_args: Settings as flags, for all daemons.

        Raises:
            StartupError: The model cannot be served.
            EngineFaultError: A daemon failed.
        """
        self._progress.expect(self._tries * (len(OF_REQUESTS) + len(OF_STOPS)))
        self._progress.say("starting the daemon")
        launcher = Launcher((*self._general.limit_args, *serve_args), self._clock)
        async with launcher.serving() as daemon:
            self._collected.subject = Subject.of(daemon.target)
            for of_requests in OF_REQUESTS:
                await self._measure(of_requests, daemon)
            mode = replace(SINGLE, name="guarantees")
            self._collected.add_server(mode, daemon.process, daemon.target)
        for of_stops in OF_STOPS:
            await self._measure(of_stops, launcher)
        return self._collected.report(self._general, url=None)

    async def _measure(self, guarantee: Guarantee[_Subject], subject: _Subject) -> None:
        self._progress.say(guarantee.name)
        self._collected.guarantees.append(
            await measure(guarantee, subject, self._tries, on_try=self._progress.advance)
        )
