"""The order of ``machd bench --prefix``: one server, restarts of it, a full cache, other formats."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from machd.bench.collected import Collected, Subject
from machd.bench.connection import ServerAddress
from machd.bench.machine import has_room
from machd.bench.modes import CONTINUOUS, REMOTE, Mode
from machd.bench.plan import BenchPlan
from machd.bench.prefix.figures import PrefixFigures
from machd.bench.prefix.full_cache import (
    PROMPTS_IN_CACHE,
    FullCacheFigures,
    WatchedServer,
    run_full_cache,
)
from machd.bench.prefix.kv_formats import (
    KV_ROUNDS,
    KV_STREAMS,
    FormatServer,
    KvFormatFigures,
    kv_format_figures,
    run_kv_round,
)
from machd.bench.prefix.mode_run import ModeRun
from machd.bench.prefix.plan import PrefixPlan
from machd.bench.prefix.prompts import PromptSource
from machd.bench.prefix.server import CachingServer
from machd.bench.progress import BenchProgress
from machd.bench.report import BenchReport
from machd.bench.server import ServerProcess
from machd.bench.target import TargetHints
from machd.bench.workload import Workload
from machd.capabilities.document import Capabilities
from machd.clock import Clock
from machd.errors import StartupError

_UNIT_BYTES = 1_000_000
"""Of ``cache.memory_mb``."""

_NO_RESTART = "steps 4a and 4b, and times after a restart: a server at --url is not restarted"
_NO_FULL_CACHE = "a full cache: it needs servers of the bench's own"
_NO_ROOM = "memory does not hold the model once for each of the servers that it takes"
_NO_SALT = "step 3a, and sharing: the server does not take cache_salt"


class PrefixBench:
    """One run. What is measured is collected in here and summed up at its end."""

    def __init__(
        self,
        plan: PrefixPlan,
        workload: Workload,
        *,
        clock: Clock,
        progress: BenchProgress,
        show: Callable[[BenchReport], None],
    ) -> None:
        """Prepare a run.

        Args:
            plan: What to measure.
            workload: Of the formats' streams; its seed is all prompts'.
            clock: Reads time.
            progress: Told how far the run is.
            show: Given what there is whenever a part of it is measured: a report that only grows.
        """
        self._show = show
        self._plan = plan
        self._workload = workload
        self._general = BenchPlan(workload, (plan.width,))
        self._clock = clock
        self._progress = progress
        self._collected = Collected(clock.unix_s())
        self._capabilities: Capabilities | None = None

    async def measure_url(self, url: str, hints: TargetHints) -> BenchReport:
        """Measure what needs no restart, of a server that runs already.

        Raises:
            OSError: It cannot be reached.
            EngineFaultError: It failed.
        """
        self._progress.expect(self._plan.remote_requests)
        self._progress.say(f"asking {url}")
        server = await self._get_to_know(ServerAddress.of(url), hints)
        self._collected.subject = Subject.of(server.target)
        run = ModeRun(self._plan, self._source(server))
        self._progress.say("steps and times")
        await run.measure(server)
        skipped = [_NO_RESTART, _NO_FULL_CACHE]
        if server.takes_salt:
            self._progress.say("a shared prompt")
            await run.measure_sharing(server)
        else:
            skipped.insert(0, _NO_SALT)
        self._collected.prefix.append(run.figures(REMOTE, skipped))
        return self._collected.report(self._general, url=url)

    async def measure_modes(self, modes: Sequence[Mode], serve_args: Sequence[str]) -> BenchReport:
        """Measure each mode, and the formats of keys and values in the one that batches.

        Args:
            modes: At least one, each with a server.
            serve_args: Settings as flags.

        Raises:
            StartupError: The model cannot be served.
            EngineFaultError: A server failed.
        """
        per_mode = len(modes) * self._plan.requests
        self._progress.expect(per_mode + self._plan.kv_requests)
        for mode in modes:
            self._collected.prefix.append(await self._measure_mode(mode, serve_args))
        return self._collected.report(self._general, url=None)

    async def _measure_mode(self, mode: Mode, serve_args: Sequence[str]) -> PrefixFigures:
        skipped: list[str] = []
        with tempfile.TemporaryDirectory(prefix="machd-bench-") as folder:
            disk_args = ("--cache-prefix", "--cache-disk-dir", str(Path(folder) / "blocks"))
            args = (*serve_args, *mode.serve_args(self._plan.width), *disk_args)
            run = await self._measure_restarts(mode, args)
        self._show_so_far(mode, run)
        plain_args = (*args, "--cache-disk-dir", "")
        if has_room(self._own_capabilities.model.weights_bytes, servers=2):
            self._progress.say(f"{mode.name}, a full cache")
            run.full_cache = await self._measure_full_cache(plain_args)
            self._show_so_far(mode, run)
        else:
            skipped.append(f"a full cache: {_NO_ROOM}")
        if mode is CONTINUOUS and self._plan.kv_formats:
            run.kv_formats = await self._measure_kv_formats(plain_args, skipped)
        return run.figures(mode, skipped)

    def _show_so_far(self, mode: Mode, run: ModeRun) -> None:
        done = self._collected.report(self._general, url=None)
        figures = [*done.prefix, run.figures(mode, [])]
        with self._progress.hidden():
            self._show(msgspec.structs.replace(done, prefix=figures))

    async def _measure_restarts(self, mode: Mode, args: Sequence[str]) -> ModeRun:
        """All that is asked of one server and of those that follow it on the same disk."""
        self._progress.say(f"{mode.name}, starting the server")
        async with self._serving(args) as (process, server):
            self._collected.subject = Subject.of(server.target)
            self._capabilities = server.target.capabilities
            run = ModeRun(self._plan, self._source(server))
            self._progress.say(f"{mode.name}, steps and times")
            await run.measure(server)
            self._progress.say(f"{mode.name}, a shared prompt")
            await run.measure_sharing(server)
            self._collected.add_server(mode, process, server.target)
        for number in range(self._plan.restarts):
            self._progress.say(f"{mode.name}, restart {number + 1}")
            async with self._serving(args) as (_, server):
                await run.measure_restarted(server, is_first=number == 0)
        return run

    async def _measure_full_cache(self, args: Sequence[str]) -> FullCacheFigures:
        load = self._plan.full_cache
        limit_mb = _small_cache_mb(self._own_capabilities, load.prompt_tokens)
        small = (*args, "--cache-memory-mb", str(limit_mb))
        if limit_mb == 1:
            # The smallest limit holds more of a tiny model's prompts than are meant to fit.
            small += ("--cache-max-entries", str(PROMPTS_IN_CACHE))
        async with (
            self._serving(small) as (full_process, full),
            self._serving((*args, "--no-cache-prefix")) as (process, server),
        ):
            return await run_full_cache(
                (WatchedServer(full_process, full), WatchedServer(process, server)),
                self._source(full),
                load,
                limit_mb * _UNIT_BYTES,
            )

    async def _measure_kv_formats(
        self, args: Sequence[str], skipped: list[str]
    ) -> list[KvFormatFigures]:
        formats = self._plan.kv_formats
        if not has_room(self._own_capabilities.model.weights_bytes, servers=len(formats)):
            skipped.append(f"formats of keys and values: {_NO_ROOM}")
            return []
        args = (*args, "--no-cache-prefix", "--cache-kv-quantization")
        servers: list[FormatServer] = []
        async with AsyncExitStack() as stack:
            for one in formats:
                self._progress.say(f"starting a server with {one}")
                try:
                    serving = self._serving((*args, one))
                    _, server = await stack.enter_async_context(serving)
                except StartupError as error:
                    skipped.append(f"{one}: {error}")
                    continue
                servers.append(FormatServer(one, server))
            for number in range(KV_ROUNDS):
                self._progress.say(f"{KV_STREAMS} streams, round {number + 1}")
                await run_kv_round(servers, self._workload, number)
        return kv_format_figures(servers)

    @asynccontextmanager
    async def _serving(
        self, args: Sequence[str]
    ) -> AsyncIterator[tuple[ServerProcess, CachingServer]]:
        """A server that has answered something: its very first requests cost more than others."""
        async with ServerProcess((*self._general.limit_args, *args), self._clock) as process:
            yield process, await self._get_to_know(ServerAddress.of(process.url))

    async def _get_to_know(
        self, address: ServerAddress, hints: TargetHints | None = None
    ) -> CachingServer:
        return await CachingServer.find(
            address, clock=self._clock, hints=hints, on_answer=self._progress.advance
        )

    @property
    def _own_capabilities(self) -> Capabilities:
        assert self._capabilities is not None, "a server of machd's has answered"
        return self._capabilities

    def _source(self, server: CachingServer) -> PromptSource:
        return PromptSource(server.vocabulary, seed=str(self._workload.seed))


def _small_cache_mb(capabilities: Capabilities, prompt_tokens: int) -> int:
    cache = capabilities.cache
    assert cache, "machd says what its caches are"
    prompt_bytes = cache.bytes_per_sequence + prompt_tokens * cache.bytes_per_token
    return max(1, PROMPTS_IN_CACHE * prompt_bytes // _UNIT_BYTES)
