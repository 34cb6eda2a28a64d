"""The order of ``machd bench --speculation``: both daemons at once, round after round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from machd.bench.collected import Collected, Subject
from machd.bench.connection import ServerAddress
from machd.bench.machine import has_room
from machd.bench.modes import SINGLE, Mode
from machd.bench.plan import BenchPlan
from machd.bench.progress import BenchProgress
from machd.bench.report import BenchReport
from machd.bench.server import ServerProcess
from machd.bench.speculation.figures import SpeculationFigures
from machd.bench.speculation.pairs import Pair, run_round
from machd.bench.speculation.plan import SpeculationPlan
from machd.bench.speculation.server import SpeculatingServer
from machd.bench.workload import Workload
from machd.clock import Clock
from machd.errors import StartupError

OFF = "off"
"""The value of ``speculation.mode`` that is compared with."""


class SpeculationBench:
    """One run. What is measured is collected in here and summed up at its end."""

    def __init__(
        self, plan: SpeculationPlan, workload: Workload, *, clock: Clock, progress: BenchProgress
    ) -> None:
        """Prepare a run.

        Args:
            plan: What to measure.
            workload: Its seed goes into the report; what is asked is the plan's.
            clock: Reads time.
            progress: Told how far the run is.
        """
        self._plan = plan
        self._general = BenchPlan(
            replace(workload, requests=plan.requests, max_tokens=plan.tokens), (1,)
        )
        self._clock = clock
        self._progress = progress
        self._collected = Collected(clock.unix_s())

    async def measure(self, serve_args: Sequence[str]) -> BenchReport:
        """Ask both daemons for everything.

        Args:
            serve_args: Settings as flags, the same for both but for ``speculation.mode``.

        Raises:
            StartupError: The model cannot be served, or not twice.
            EngineFaultError: A daemon failed.
        """
        plan = self._plan
        self._progress.expect(plan.requests)
        self._progress.say("starting the daemon that does not guess")
        async with self._serving(serve_args, OFF) as off:
            self._collected.subject = Subject.of(off.target)
            _check_room(off)
            self._progress.say("starting the daemon that guesses")
            async with self._serving(serve_args, plan.mode) as on:
                pairs = await self._measure(off, on)
        active_mode, reason = _activity(on)
        self._collected.speculation = SpeculationFigures.of(
            plan, pairs, active_mode=active_mode, reason=reason
        )
        return self._collected.report(self._general, url=None)

    async def _measure(self, off: SpeculatingServer, on: SpeculatingServer) -> list[Pair]:
        pairs: list[Pair] = []
        for number in range(self._plan.rounds):
            self._progress.say(f"round {number + 1} of {self._plan.rounds}")
            pairs += await run_round(off, on, self._plan, number, on_answer=self._progress.advance)
        return pairs

    @asynccontextmanager
    async def _serving(
        self, serve_args: Sequence[str], mode: str
    ) -> AsyncIterator[SpeculatingServer]:
        """A daemon that has answered something: its very first requests cost more than others."""
        args = (*self._general.limit_args, *serve_args, "--speculation-mode", mode)
        async with ServerProcess(args, self._clock) as process:
            address = ServerAddress.of(process.url)
            server = await SpeculatingServer.find(address, clock=self._clock)
            yield server
            self._collected.add_server(_named(mode), process, server.target)


def _named(mode: str) -> Mode:
    """How a daemon's line of the report begins."""
    return replace(SINGLE, name=f"speculation {mode}")


def _check_room(server: SpeculatingServer) -> None:
    capabilities = server.target.capabilities
    assert capabilities is not None, "machd says what it is"
    if not has_room(capabilities.model.weights_bytes, servers=1):
        raise StartupError(
            "memory does not hold the model twice, which --speculation needs: take a smaller model"
        )


def _activity(server: SpeculatingServer) -> tuple[str | None, str | None]:
    """What a daemon says that it does, and why."""
    capabilities = server.target.capabilities
    if capabilities is None:
        return None, None
    return capabilities.speculation.mode, capabilities.speculation.mode_reason
