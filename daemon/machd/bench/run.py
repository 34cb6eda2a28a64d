"""The order of a bench: bare loop, then mode after mode, the bare loop between their levels."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

from machd.bench.ceiling import CeilingProcess, CeilingQuery
from machd.bench.client import ClientMaker, CompletionClient
from machd.bench.coalescing import run_coalescing
from machd.bench.collected import Collected, Subject
from machd.bench.connection import ServerAddress
from machd.bench.level import Level, run_level, warm_up
from machd.bench.long_prompt import run_long_prompt
from machd.bench.modes import REMOTE, Batching, Mode
from machd.bench.plan import BenchPlan
from machd.bench.progress import BenchProgress
from machd.bench.report import BenchReport
from machd.bench.scenarios import Scenario
from machd.bench.server import ServerProcess
from machd.bench.staggered import StaggeredTimings, run_staggered
from machd.bench.static import StaticBatcher
from machd.bench.structured import run_structured
from machd.bench.target import Target, TargetHints
from machd.clock import Clock

_Clients: TypeAlias = Callable[[int, int], ClientMaker]
"""For so many clients that send so many requests in all."""

_AfterLevel: TypeAlias = Callable[[Level], Awaitable[None]]


class Bench:
    """One run. What is measured is collected in here and summed up at its end."""

    def __init__(self, plan: BenchPlan, *, clock: Clock, progress: BenchProgress) -> None:
        """Prepare a run.

        Args:
            plan: What to measure.
            clock: Reads time.
            progress: Told how far the run is.
        """
        self._plan = plan
        self._clock = clock
        self._progress = progress
        self._collected = Collected(clock.unix_s())

    async def measure_url(self, url: str, hints: TargetHints) -> BenchReport:
        """Measure a server that runs already; there is no bare loop to hold it against.

        Raises:
            OSError: It cannot be reached.
            EngineFaultError: It failed.
        """
        self._progress.expect(self._plan.request_count(REMOTE))
        self._progress.say(f"asking {url}")
        target = await Target.find(ServerAddress.of(url), clock=self._clock, hints=hints)
        self._collected.subject = Subject.of(target)
        await self._measure(REMOTE, self._http_clients(target), _nothing)
        return self._collected.report(self._plan, url=url)

    async def measure_modes(self, modes: Sequence[Mode], serve_args: Sequence[str]) -> BenchReport:
        """Measure each mode and the bare loop in turns.

        The bare loop stays loaded and runs between the levels, while the server is idle, so that
        a machine whose speed drifts slows both. Where memory does not hold the weights twice it
        runs before the first server and after the last.

        Args:
            modes: At least one.
            serve_args: Settings as flags.

        Raises:
            StartupError: The model cannot be served.
            EngineFaultError: A server or the bare loop failed.
        """
        widths = self._plan.bare_widths(modes)
        requests = sum(self._plan.request_count(mode) for mode in modes)
        levels = len(modes) * len(self._plan.concurrencies) if widths else 0
        self._progress.expect(requests + len(widths) + levels)
        bare = CeilingProcess(serve_args)
        try:
            await self._run_bare(bare, widths)
            stays = bare.ready is None or bare.ready.leaves_room_for_server
            if not stays:
                self._progress.expect(requests + 2 * len(widths))
            for mode in modes:
                if mode.batching is Batching.STATIC:
                    await self._measure_static(mode, bare)
                    continue
                if not stays:
                    await bare.close()
                await self._measure_server(mode, serve_args, bare if stays else None)
            if not stays:
                await self._run_bare(bare, widths)
        finally:
            await bare.close()
        return self._collected.report(self._plan, url=None)

    async def _measure_server(
        self, mode: Mode, serve_args: Sequence[str], bare: CeilingProcess | None
    ) -> None:
        self._progress.say("starting the server")
        plan = self._plan
        args = (*plan.limit_args, *serve_args, *mode.serve_args(plan.max_width))
        async with ServerProcess(args, self._clock) as server:
            target = await Target.find(ServerAddress.of(server.url), clock=self._clock)
            after_level = partial(self._run_bare_again, bare) if bare else _nothing
            await self._measure(mode, self._http_clients(target), after_level)
            self._collected.add_server(mode, server, target)
        self._collected.subject = Subject.of(target)

    async def _measure_static(self, mode: Mode, bare: CeilingProcess) -> None:
        def clients(width: int, requests: int) -> ClientMaker:
            return StaticBatcher(bare, width=width, requests=requests, clock=self._clock).client

        await self._measure(mode, clients, partial(self._run_bare_again, bare))
        assert bare.ready is not None, "it has answered"
        self._collected.subject = self._collected.subject or Subject(bare.ready.model, None)

    def _http_clients(self, target: Target) -> _Clients:
        return lambda _clients, _requests: partial(CompletionClient, target, self._clock)

    async def _measure(self, mode: Mode, clients: _Clients, after_level: _AfterLevel) -> None:
        """Run every scenario that the mode can be measured with."""
        for scenario in self._plan.of_mode(mode):
            if scenario is Scenario.SWEEP:
                await self._sweep(mode, clients, after_level)
                continue
            self._progress.say(f"{mode.name}, {scenario.value}")
            await self._run_scenario(scenario, mode, clients)

    async def _sweep(self, mode: Mode, clients: _Clients, after_level: _AfterLevel) -> None:
        workload = self._plan.workload
        for concurrency in self._plan.concurrencies:
            self._progress.say(f"{mode.name}, concurrency {concurrency}")
            width = mode.batch_width(concurrency)
            level = Level(mode.name, _series(concurrency), concurrency, width)
            await warm_up(clients(concurrency, concurrency), workload, concurrency)
            make_client = clients(concurrency, workload.request_count(concurrency))
            self._collected.levels.append(
                await run_level(make_client, workload, level, on_request=self._progress.advance)
            )
            await after_level(level)

    async def _run_scenario(self, scenario: Scenario, mode: Mode, clients: _Clients) -> None:
        plan, collected, advance = self._plan, self._collected, self._progress.advance
        if scenario is Scenario.STAGGERED:
            arrivals = plan.arrivals
            await warm_up(
                clients(arrivals.streams, arrivals.streams), plan.workload, arrivals.streams
            )
            make_client = clients(arrivals.streams, arrivals.requests)
            timings = await run_staggered(make_client, plan.workload, arrivals, on_request=advance)
            collected.staggered.append(StaggeredTimings(mode.name, timings))
        elif scenario is Scenario.LONG_PROMPT:
            make_client = clients(plan.max_width, 1)
            load = plan.long_prompt
            collected.long_prompt.append(
                await run_long_prompt(make_client, plan.workload, load, mode=mode.name)
            )
            advance()
        elif scenario is Scenario.COALESCING:
            make_client = clients(plan.max_width, 1)
            collected.coalescing.append(
                await run_coalescing(make_client, plan.workload, mode=mode.name, on_request=advance)
            )
        else:
            assert scenario is Scenario.STRUCTURED, "the sweep has levels"
            make_client = clients(plan.max_width, 1)
            collected.structured.append(
                await run_structured(make_client, plan.workload, mode=mode.name, on_request=advance)
            )

    async def _run_bare_again(self, bare: CeilingProcess, level: Level) -> None:
        if level.batch_width is not None:
            await self._run_bare(bare, [level.batch_width], series=level.series)

    async def _run_bare(
        self, bare: CeilingProcess, widths: Sequence[int], *, series: str | None = None
    ) -> None:
        workload = self._plan.workload
        for width in widths:
            self._progress.say(f"bare loop, width {width}")
            query = CeilingQuery(
                prompts=workload.prompts(series or _series(width), width),
                steps=workload.max_tokens - 1,
            )
            self._collected.bare.append(await bare.measure(query))
            self._progress.advance()


def _series(concurrency: int) -> str:
    """The prompts of a level, in every mode and in the bare loop."""
    return f"level-{concurrency}"


async def _nothing(_level: Level) -> None:
    """After a level without a bare loop."""
