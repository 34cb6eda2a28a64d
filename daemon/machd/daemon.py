"""One process from its first listening to its last answer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from typing import Any, Never

import structlog

from machd.admin.errors import ADMIN_ENVELOPE
from machd.clock import Clock, SystemClock
from machd.compose import Parts
from machd.dialects.endpoints import SOCKET_PATHS
from machd.dialects.envelopes import envelope_of
from machd.engine.protocol.engine import ModelFront
from machd.entrance import Entrance
from machd.errors import (
    DrainDeadlineError,
    DrainingError,
    EngineFaultError,
    FaultError,
    MachdError,
)
from machd.generations.workers import Workers
from machd.http.connection import WebSockets
from machd.http.file_limit import ADMIN_CONNECTIONS
from machd.http.server import HttpServer, HttpServers
from machd.link.decode_mode import DecodeModeDecision
from machd.link.port import EnginePort, OpenEngine
from machd.process.idle_heap import IdleHeap
from machd.process.lifecycle import State
from machd.process.notify import ServiceNotifier
from machd.process.service_report import ServiceReport
from machd.served.adapter_readings import NO_ADAPTER_FILES, AdapterFiles
from machd.settings.sources import LoadedSettings, SettingsSources
from machd.telemetry.log_ring import LogRing

_ENGINE_JOIN_S = 5.0
"""How long a step in flight may take to end when the daemon leaves."""

_HUNG_JOIN_S = 0.5
"""The same for a step that has already taken longer than ``engine.stall_timeout_s``."""

_WRITING_JOIN_S = 12.0
"""How long the engine, once it has stopped, may take to give back what it has: the disk tier of blocks
writes what is queued."""

_SERVER_JOIN_S = 10.0

_SYSTEM_THREADS = 4
"""For what may wait for the system: settings that are read, the heap, an engine that ends."""

_LAST_ANSWER_S = 1.0
"""How long clients get to read why their answers end, when nothing else is waited for."""

_LAST_SPANS_S = 2.0
"""How long the last spans may take to be sent."""

_LAST_EVENTS_S = 2.0
"""How long the last KV events may take to be sent."""


class Daemon:
    """One process: a listener, a server, an engine. Runs once."""

    def __init__(  # noqa: PLR0913 - one argument for each thing from outside
        self,
        sources: SettingsSources,
        loaded: LoadedSettings,
        open_engine: OpenEngine,
        *,
        adapter_files: AdapterFiles = NO_ADAPTER_FILES,
        clock: Clock | None = None,
        on_ready: Callable[[str, ModelFront | None], None] = lambda _url, _front: None,
        log: LogRing | None = None,
    ) -> None:
        """Read the keys and bind the addresses, so that mistakes show before the model loads.

        Args:
            sources: Where a reload reads settings; its variables are the process's, with the
                sockets and credentials that a service manager hands over.
            loaded: What was read from there.
            open_engine: Makes the engine that the settings ask for.
            adapter_files: Reads the files of adapters.
            clock: Reads time; the machine's clocks unless given.
            on_ready: Told the URL once requests are taken, and the model where there is but one.
            log: Has the last events of the log for operators; None where the logs are configured without one.

        Raises:
            ListenError: An address is taken, or is public while no API key is required.
            SettingsError: The key file is wrong.
        """
        self._sources = sources
        self._loaded = loaded
        self._open_engine = open_engine
        self._adapter_files = adapter_files
        self._clock = clock or SystemClock()
        self._on_ready = on_ready
        self._log_ring = log or LogRing()
        self._decode_mode: DecodeModeDecision | None = None
        self._log = structlog.get_logger("machd.daemon")
        self._notifier = ServiceNotifier(sources.environ, self._clock)
        self._entrance = Entrance(loaded.settings, sources.environ)
        self._stop_requests = 0
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._reload_asked = False
        self._reload_task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Return the URL of the public listener."""
        return self._entrance.public.url

    @property
    def admin_url(self) -> str | None:
        """Return the URL of the admin listener; None without one."""
        return None if self._entrance.admin is None else self._entrance.admin.url

    @property
    def decode_mode(self) -> DecodeModeDecision | None:
        """Return how sequences are decoded, and why; None until the model is loaded."""
        return self._decode_mode

    def request_stop(self) -> None:
        """Drain; the second time, stop at once. Call it on the daemon's event loop."""
        self._stop_requests += 1
        (self._stop if self._stop_requests == 1 else self._stop_now).set()

    async def run(self) -> None:
        """Serve until told to stop.

        Raises:
            MachdError: The model could not be loaded, or the engine stopped for good.
        """
        # asyncio would start its own threads when they are needed, and wait for them at the end.
        workers = Workers(_SYSTEM_THREADS, name="machd-system")
        asyncio.get_running_loop().set_default_executor(workers)
        try:
            parts = Parts(
                self._sources,
                self._loaded,
                self._open_engine,
                self._clock,
                admit=self._entrance.admit,
                is_exposed=self._entrance.public.is_exposed,
                holds_admin_token=self._entrance.holds_admin_token,
                adapter_files=self._adapter_files,
                log=self._log_ring,
            )
            await self._run(parts)
        finally:
            self._entrance.close()
            self._notifier.close()

    def _make_servers(self, parts: Parts) -> HttpServers:
        entrance = self._entrance
        public = HttpServer(
            parts.app,
            entrance.public,
            max_connections=lambda: parts.max_connections,
            stall_timeout_s=lambda: parts.configuration.settings.limits.client_stall_timeout_s,
            envelope_of=envelope_of,
            sockets=WebSockets(
                SOCKET_PATHS,
                # A message that is a little too long gets its error; one beyond this ends its socket.
                lambda: 2 * parts.configuration.settings.limits.max_body_bytes,
            ),
        )
        if entrance.admin is None or entrance.admin_token is None:
            return HttpServers(public)
        admin = HttpServer(
            parts.admin_app(entrance.admin_token),
            entrance.admin,
            max_connections=lambda: ADMIN_CONNECTIONS,
            stall_timeout_s=lambda: parts.configuration.settings.limits.client_stall_timeout_s,
            envelope_of=lambda _: ADMIN_ENVELOPE,
        )
        return HttpServers(public, admin)

    async def _run(self, parts: Parts) -> None:
        servers = self._make_servers(parts)
        report = ServiceReport(
            self._notifier,
            configuration=parts.configuration,
            lifecycle=parts.lifecycle,
            models=parts.models,
            open_requests=lambda: len(parts.open_generations),
            throughput=parts.throughput,
            clock=self._clock,
        )
        heap = IdleHeap(
            lambda: parts.lifecycle.state is State.READY and len(parts.open_generations) == 0
        )
        watches = [
            asyncio.create_task(watch)
            for watch in (
                parts.lag.watch(),
                report.watch(),
                heap.watch(),
                parts.memory.watch(),
            )
        ]
        self._take_signals(parts, report)
        servers.start()
        self._log.info(
            "daemon.listening",
            url=self.url,
            admin_url=self.admin_url,
            is_inherited=self._entrance.public.is_inherited,
        )
        try:
            if not self._stop.is_set():
                await self._load_model(parts, servers, report)
            if not self._stop.is_set():
                await self._wait_for_end(parts, servers, self._stop)
            await self._give_notice(parts, servers, report)
            await self._drain(parts, servers, report)
        finally:
            parts.lifecycle.become(State.STOPPED)
            parts.models.stop(DrainDeadlineError("the server has stopped"))
            self._entrance.withdraw_token()
            await parts.downloads.stop()
            await servers.stop(_SERVER_JOIN_S)
            parts.open_generations.close()
            for tracer in parts.tracers:
                await asyncio.to_thread(tracer.close, within_s=_LAST_SPANS_S)
            stall_timeout_s = parts.configuration.settings.engine.stall_timeout_s
            loaded = [
                one.served.link for one in parts.models.with_leaving if one.served.state is not None
            ]
            await asyncio.gather(*(_join(one, stall_timeout_s) for one in loaded))
            if parts.kv_events is not None:
                await asyncio.to_thread(parts.kv_events.close, within_s=_LAST_EVENTS_S)
            for watch in watches:
                watch.cancel()
            self._log.info("daemon.stopped")
        finished = parts.default.served.link.finished
        if parts.models.is_one and finished.done() and (error := finished.exception()) is not None:
            raise EngineFaultError("the engine had failed when it was told to stop") from error

    async def _load_model(self, parts: Parts, servers: HttpServers, report: ServiceReport) -> None:
        """Wait for the model, or for a stop.

        Raises:
            MachdError: It could not be loaded.
        """
        default = parts.models.default
        loading = asyncio.gather(
            *(one.want() for one in parts.models.to_load_first()), return_exceptions=True
        )
        stop = asyncio.create_task(self._stop.wait())
        await _first_of(loading, stop)
        stop.cancel()
        if not loading.done():
            return
        if parts.models.is_one:
            for error in filter(None, loading.result()):
                self._raise_load_failure(parts, default.cause or error)
            self._decode_mode = parts.default.announcements.announce()
        parts.lifecycle.become(State.READY)
        await servers.start_all()
        report.ready()
        self._log.info("daemon.ready", url=self.url, model=default.shown_name)
        self._on_ready(self.url, default.served.front if parts.models.is_one else None)

    def _raise_load_failure(self, parts: Parts, cause: BaseException) -> Never:
        if isinstance(cause, MachdError):
            raise cause
        parts.lifecycle.become(State.FAILED)
        self._log.critical("model.load_failed", exc_info=cause)
        raise EngineFaultError("the model could not be loaded; the log says why") from cause

    async def _wait_for_end(
        self,
        parts: Parts,
        servers: HttpServers,
        stop_event: asyncio.Event,
        timeout_s: float | None = None,
    ) -> None:
        """Serve until a stop is asked for; an engine or a server that fails ends the daemon.

        Raises:
            FaultError: One did.
        """
        stop = asyncio.create_task(stop_event.wait())
        failed = asyncio.create_task(_engine_failed(parts))
        ended = asyncio.create_task(servers.wait_ended())
        await _first_of(stop, ended, failed, timeout_s=timeout_s)
        for task in (stop, failed, ended):
            task.cancel()
        if ended.done() and not ended.cancelled():
            raise FaultError("the HTTP server has stopped") from ended.exception()
        if failed.done():
            await self._give_up(parts, servers)

    async def _give_up(self, parts: Parts, servers: HttpServers) -> None:
        """Tell everyone that the engine is gone.

        Raises:
            EngineFaultError: Always.
        """
        if parts.lifecycle.state in {State.READY, State.RESTARTING, State.LEAVING}:
            parts.lifecycle.become(State.FAILED)
        servers.leave()
        fault = EngineFaultError("the engine has stopped; the server is restarting")
        parts.open_generations.fail_open(fault)
        await parts.open_generations.drain(_LAST_ANSWER_S)
        finished = parts.default.served.link.finished
        raise fault from finished.exception() if finished.done() else None

    async def _give_notice(self, parts: Parts, servers: HttpServers, report: ServiceReport) -> None:
        """Go on serving while routers learn from /health/ready that the daemon leaves.

        A daemon that loads, or that an operator drains, gives no notice: it was not ready before.

        Raises:
            FaultError: The engine or a server failed meanwhile.
        """
        notice_s = parts.configuration.settings.limits.drain_notice_s
        if notice_s == 0.0 or parts.lifecycle.state not in {State.READY, State.RESTARTING}:
            return
        parts.lifecycle.become(State.LEAVING)
        self._log.info(
            "daemon.leaving", notice_s=notice_s, open_requests=len(parts.open_generations)
        )
        report.stopping()
        await self._wait_for_end(parts, servers, self._stop_now, notice_s)

    async def _drain(self, parts: Parts, servers: HttpServers, report: ServiceReport) -> None:
        """Take nothing new and let the open generations end, up to the deadline.

        Raises:
            EngineFaultError: The engine stopped meanwhile.
        """
        parts.lifecycle.become(State.DRAINING)
        servers.leave()
        self._log.info("daemon.draining", open_requests=len(parts.open_generations))
        # They have no generation that the drain would wait for, and their models may take minutes.
        parts.models.end_waiting(
            DrainingError("the server is draining: it loads no model any more")
        )
        report.stopping()
        timeout_s = parts.configuration.settings.limits.drain_timeout_s
        drained = asyncio.create_task(parts.open_generations.drain(timeout_s))
        at_once = asyncio.create_task(self._stop_now.wait())
        # A model that still loads makes no steps, so there is nothing that could hang.
        is_loaded = parts.default.served.state is not None
        failed = asyncio.create_task(_engine_failed(parts)) if is_loaded else None
        await _first_of(drained, at_once, *([failed] if failed else []))
        at_once.cancel()
        if failed is not None and not failed.done():
            failed.cancel()
        elif failed is not None:
            drained.cancel()
            await self._give_up(parts, servers)
        if not drained.done():
            parts.open_generations.fail_open(
                DrainDeadlineError("the server was told to stop at once")
            )
            await asyncio.wait({drained}, timeout=_LAST_ANSWER_S)
            drained.cancel()

    def _take_signals(self, parts: Parts, report: ServiceReport) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        event_loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            event_loop.add_signal_handler(number, self.request_stop)
        event_loop.add_signal_handler(signal.SIGHUP, self._request_reload, parts, report)
        # The command line lets a reload wait until it can be done.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    def _request_reload(self, parts: Parts, report: ServiceReport) -> None:
        """Read the settings again; what comes of it is logged.

        However many signals come while that is done, it is done once more for all of them.
        """
        self._reload_asked = True
        if self._reload_task is None or self._reload_task.done():
            self._reload_task = asyncio.create_task(self._reload(parts, report))

    async def _reload(self, parts: Parts, report: ServiceReport) -> None:
        while self._reload_asked:
            self._reload_asked = False
            report.reloading()
            try:
                # A refusal is logged and counted where it is made; the old settings stay.
                with contextlib.suppress(MachdError):
                    await parts.configuration.reload()
            finally:
                report.reloaded()


async def _join(loop: EnginePort, stall_timeout_s: float) -> None:
    """Wait for the engine thread: for a step that hangs not long, for what is written longer."""
    step_s = _HUNG_JOIN_S if loop.heartbeat_age_s > stall_timeout_s else _ENGINE_JOIN_S
    has_ended = await asyncio.to_thread(loop.join, step_s)
    if not has_ended and loop.finished.done():
        has_ended = await asyncio.to_thread(loop.join, _WRITING_JOIN_S)
    if not has_ended:
        loop.kill()


async def _engine_failed(parts: Parts) -> None:
    """Return once the only model's engine can answer no request any more; of several, one that fails leaves the others."""
    if parts.models.is_one:
        await parts.default.watch().failed()
    else:
        await asyncio.Event().wait()


async def _first_of(*futures: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
