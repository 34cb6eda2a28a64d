"""The order of a bench: bare loop, server, one level after the other, bare loop."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from machd.bench.ceiling import CeilingAnswer, CeilingProcess, CeilingQuery
from machd.bench.client import Target
from machd.bench.connection import ServerAddress
from machd.bench.figures import LevelFigures, ceilings_of
from machd.bench.level import Level, LevelTimings, run_level
from machd.bench.machine import MachineFacts
from machd.bench.modes import REMOTE, Mode
from machd.bench.progress import BenchProgress
from machd.bench.report import BenchReport, ModelFacts, ServerFigures, WorkloadFacts
from machd.bench.server import ServerProcess
from machd.bench.workload import Workload
from machd.clock import Clock

__all__ = ["Bench"]


class Bench:
    """One run. What is measured is collected in here and summed up at its end."""

    def __init__(
        self,
        workload: Workload,
        concurrencies: Sequence[int],
        *,
        clock: Clock,
        progress: BenchProgress,
    ) -> None:
        """Prepare a run.

        Args:
            workload: What every level asks for.
            concurrencies: The levels, in their order.
            clock: Reads time.
            progress: Told how far the run is.
        """
        self._workload = workload
        self._concurrencies = tuple(concurrencies)
        self._clock = clock
        self._progress = progress
        self._started_at = datetime.fromtimestamp(clock.unix_s(), UTC)
        self._machine = MachineFacts.read()
        self._levels: list[LevelTimings] = []
        self._bare: list[CeilingAnswer] = []
        self._servers: list[ServerFigures] = []

    async def measure_url(self, url: str, *, api_key: str | None) -> BenchReport:
        """Measure a server that runs already; there is no bare loop to hold it against.

        Raises:
            OSError: It cannot be reached.
            EngineFaultError: It failed.
        """
        self._progress.expect(self._request_count)
        self._progress.say(f"asking {url}")
        target = await Target.find(ServerAddress.of(url), api_key=api_key, clock=self._clock)
        for index, concurrency in enumerate(self._concurrencies):
            await self._run_level(target, Level(REMOTE, index, concurrency, None))
        return self._report(target, url=url)

    async def measure_modes(self, modes: Sequence[Mode], serve_args: Sequence[str]) -> BenchReport:
        """Start machd in each mode, and measure it and the bare loop in turns.

        The bare loop stays loaded and runs between the levels, while the server is idle, so that
        a machine whose speed drifts slows both. Where memory does not hold the weights twice it
        runs before the first server and after the last.

        Args:
            modes: At least one.
            serve_args: Settings as flags.

        Raises:
            StartupError: The model cannot be served.
            EngineFaultError: The server or the bare loop failed.
        """
        widths = sorted(
            {mode.batch_width(level) for mode in modes for level in self._concurrencies}
        )
        work_count = len(modes) * self._request_count
        self._progress.expect(work_count + len(widths) + len(modes) * len(self._concurrencies))
        bare = CeilingProcess(serve_args)
        target: Target | None = None
        try:
            await self._run_bare(bare, widths)
            assert bare.ready is not None, "it has answered"
            stays = bare.ready.leaves_room_for_server
            if not stays:
                self._progress.expect(work_count + 2 * len(widths))
                await bare.close()
            for mode in modes:
                target = await self._measure_mode(mode, serve_args, bare if stays else None)
            if not stays:
                await self._run_bare(bare, widths)
        finally:
            await bare.close()
        assert target is not None, "there is a mode"
        return self._report(target, url=None)

    async def _measure_mode(
        self, mode: Mode, serve_args: Sequence[str], bare: CeilingProcess | None
    ) -> Target:
        self._progress.say("starting the server")
        async with ServerProcess([*serve_args, *mode.serve_args], self._clock) as server:
            ready_rss_bytes = server.rss_bytes()
            target = await Target.find(
                ServerAddress.of(server.url), api_key=None, clock=self._clock
            )
            end_rss_bytes = ready_rss_bytes
            for index, concurrency in enumerate(self._concurrencies):
                width = mode.batch_width(concurrency)
                await self._run_level(target, Level(mode.name, index, concurrency, width))
                end_rss_bytes = server.rss_bytes()
                if bare is not None:
                    await self._run_bare(bare, [width])
        weights_bytes = ModelFacts.of(target.model_id, target.capabilities).weights_bytes
        self._servers.append(
            ServerFigures(
                mode=mode.name,
                start_to_ready_s=server.start_to_ready_s,
                ready_rss_bytes=ready_rss_bytes,
                end_rss_bytes=end_rss_bytes,
                ready_beyond_weights_bytes=_less(ready_rss_bytes, weights_bytes),
                end_beyond_weights_bytes=_less(end_rss_bytes, weights_bytes),
            )
        )
        return target

    async def _run_level(self, target: Target, level: Level) -> None:
        self._progress.say(f"{level.mode}, concurrency {level.concurrency}")
        advance = self._progress.advance
        self._levels.append(
            await run_level(target, self._workload, level, clock=self._clock, on_request=advance)
        )

    async def _run_bare(self, bare: CeilingProcess, widths: Sequence[int]) -> None:
        for width in widths:
            self._progress.say(f"bare loop, width {width}")
            query = CeilingQuery(
                batch_width=width,
                prompt_tokens=self._workload.prompt_tokens,
                steps=self._workload.max_tokens - 1,
            )
            self._bare.append(await bare.measure(query))
            self._progress.advance()

    @property
    def _request_count(self) -> int:
        return sum(self._workload.request_count(one) for one in self._concurrencies)

    def _report(self, target: Target, *, url: str | None) -> BenchReport:
        workload = self._workload
        ceilings = ceilings_of(self._bare, max_tokens=workload.max_tokens)
        return BenchReport(
            started_at=self._started_at.isoformat(timespec="seconds"),
            url=url,
            machine=self._machine,
            model=ModelFacts.of(target.model_id, target.capabilities),
            workload=WorkloadFacts(
                requests=workload.requests,
                prompt_tokens=workload.prompt_tokens,
                max_tokens=workload.max_tokens,
                seed=workload.seed,
                endpoint=target.dialect.path,
                ignores_eos=target.dialect.ignores_eos,
            ),
            levels=[LevelFigures.of(level, ceilings) for level in self._levels],
            ceilings=ceilings,
            servers=self._servers,
        )


def _less(rss_bytes: int, weights_bytes: int | None) -> int | None:
    return None if weights_bytes is None else rss_bytes - weights_bytes
