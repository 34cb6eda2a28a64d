"""Settings to a running daemon: the only module that knows every part."""

from __future__ import annotations

import asyncio
import ipaddress
import platform
import signal
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog

from machd import __version__
from machd.api.capabilities import Versions
from machd.clock import Clock, SystemClock
from machd.engine.blas import choose_blas, measure_blas
from machd.engine.mlx_lm_import import import_mlx_lm
from machd.engine.progress import LoadProgress
from machd.engine.protocol import Engine
from machd.engine.scratch import private_scratch_directory, use_scratch_directory
from machd.engine.source import resolve_model
from machd.errors import DrainDeadlineError, EngineFaultError, ListenError
from machd.http.app import create_app
from machd.http.authentication import ApiKeys
from machd.http.context import ServerContext
from machd.http.server import HttpServer, Listener, listen
from machd.scheduler.events import DecodeMode
from machd.scheduler.single_flight import SingleFlightScheduler
from machd.scheduler.waiting import QueueLimits
from machd.serving.fanout import Fanout
from machd.serving.lifecycle import Lifecycle, State
from machd.serving.loop import EngineLoop
from machd.serving.service import GenerationLimits, GenerationService
from machd.settings.model import Settings
from machd.telemetry.lag import EventLoopLag
from machd.telemetry.logs import RequestLog
from machd.telemetry.metrics import Metrics

__all__ = ["Daemon", "engine_loader", "installed_versions"]

_ENGINE_JOIN_S = 5.0
"""How long a step in flight may take to end when the daemon leaves."""

_SERVER_JOIN_S = 10.0


def installed_versions() -> Versions:
    """Of machd and what it was measured with; read from the installed packages."""
    return Versions(machd=__version__, mlx=_version("mlx"), mlx_lm=_version("mlx-lm"))


def engine_loader(
    settings: Settings,
    *,
    cache_directory: Path,
    set_variable: Callable[[str, str], None],
    progress: LoadProgress,
) -> Callable[[], Engine]:
    """Prepare the process for mlx, then give the function that loads the model.

    Chooses the BLAS and the private scratch directory now, because both must be settled before
    anything imports mlx; the function imports it, on the thread that calls it.

    Args:
        settings: Validated settings.
        cache_directory: The user's cache directory.
        set_variable: Sets an environment variable of this process.
        progress: Told about loading.

    Raises:
        StartupError: The BLAS asked for cannot be loaded, or the scratch directory is not private.
    """
    choice = choose_blas(settings.engine.blas)
    use_scratch_directory(private_scratch_directory(cache_directory / "machd"), set_variable)

    def load() -> Engine:
        model = settings.model
        source = resolve_model(
            model.path, offline=model.offline, cache_directory=cache_directory, progress=progress
        )
        progress.stage("importing mlx-lm", None)
        import_mlx_lm()
        from machd.engine.loader import load_model  # noqa: PLC0415 - imports mlx
        from machd.engine.mlx_engine import MlxEngine  # noqa: PLC0415 - imports mlx

        log = structlog.get_logger("machd.engine")
        report = measure_blas(choice)
        log.info(
            "blas.measured",
            backend=report.backend,
            library=report.name,
            one_row_ms=report.one_row_ms,
            sixteen_rows_ms=report.sixteen_rows_ms,
        )
        if report.advice:
            log.warning("blas.slow", advice=report.advice)
        loaded = load_model(
            source,
            dtype=model.dtype,
            max_context_tokens=model.max_context_tokens,
            trust_remote_code=model.trust_remote_code,
            chat_template=model.chat_template,
            progress=progress,
            blas=report.name,
        )
        for note in loaded.notes:
            log.warning("model.note", note=note)
        return MlxEngine(loaded)

    return load


class Daemon:
    """One process: a listener, a server, an engine thread. Runs once."""

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Engine],
        *,
        environ: Mapping[str, str],
        clock: Clock | None = None,
        on_ready: Callable[[str, Engine], None] = lambda _url, _engine: None,
    ) -> None:
        """Read the keys and bind the address, so that mistakes show before the model loads.

        Args:
            settings: Validated settings.
            load: Makes the engine; called on the engine thread.
            environ: The process's variables, for a socket handed over by the service manager.
            clock: Reads time; the machine's clocks unless given.
            on_ready: Told the URL and the engine once requests are taken.

        Raises:
            ListenError: The address is taken, or is public while no API key is required.
            SettingsError: The key file is wrong.
        """
        self.settings = settings
        self._load = load
        self._clock = clock or SystemClock()
        self._on_ready = on_ready
        self._log = structlog.get_logger("machd.daemon")
        keys_file = settings.auth.api_keys_file
        self._api_keys = ApiKeys.read(Path(keys_file)) if keys_file else ApiKeys.none()
        _check_exposure(settings.server.host, self._api_keys)
        self._listener: Listener = listen(
            settings.server.host, settings.server.port, environ=environ
        )
        self._stop_requests = 0
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    @property
    def url(self) -> str:
        """Where the daemon listens."""
        return self._listener.url

    def request_stop(self) -> None:
        """Drain; the second time, stop at once. Call it on the daemon's event loop."""
        self._stop_requests += 1
        (self._stop if self._stop_requests == 1 else self._stop_now).set()

    async def run(self) -> None:
        """Serve until told to stop.

        Raises:
            MachdError: The model could not be loaded, or the engine stopped for good.
        """
        parts = _Parts(self.settings, self._load, self._clock, self._api_keys)
        server = HttpServer(parts.app)
        serving = asyncio.create_task(server.serve(sockets=[self._listener.socket]))
        lag = asyncio.create_task(parts.lag.watch())
        self._take_signals()
        parts.loop.start()
        self._log.info("daemon.listening", url=self.url)
        try:
            await self._load_model(parts)
            if not self._stop.is_set():
                await self._wait_for_end(parts, serving)
            await self._drain(parts)
        finally:
            lag.cancel()
            parts.lifecycle.become(State.STOPPED)
            parts.loop.stop(DrainDeadlineError("the server has stopped"))
            server.should_exit = True
            await asyncio.wait({serving}, timeout=_SERVER_JOIN_S)
            parts.service.close()
            self._listener.close()
            if parts.loop.loaded.done():
                await asyncio.to_thread(parts.loop.join, _ENGINE_JOIN_S)
            self._log.info("daemon.stopped")

    async def _load_model(self, parts: _Parts) -> None:
        loaded = asyncio.wrap_future(parts.loop.loaded)
        stop = asyncio.create_task(self._stop.wait())
        await _first_of(loaded, stop)
        stop.cancel()
        if not loaded.done():
            return
        engine = loaded.result()
        parts.announce(engine)
        parts.lifecycle.become(State.READY)
        self._log.info("daemon.ready", url=self.url, model=engine.model.model_id)
        self._on_ready(self.url, engine)

    async def _wait_for_end(self, parts: _Parts, serving: asyncio.Task[None]) -> None:
        """Until a stop is asked for; an engine that stops for good ends the daemon.

        Raises:
            EngineFaultError: It did.
        """
        finished = asyncio.wrap_future(parts.loop.finished)
        stop = asyncio.create_task(self._stop.wait())
        await _first_of(finished, stop, serving)
        stop.cancel()
        if finished.done():
            parts.lifecycle.become(State.FAILED)
            fault = EngineFaultError("the engine has stopped; the server is restarting")
            parts.service.fail_open(fault)
            await parts.service.drain(1.0)
            raise fault from finished.exception()

    async def _drain(self, parts: _Parts) -> None:
        """Take nothing new and let the open generations end, up to the deadline."""
        parts.lifecycle.become(State.DRAINING)
        self._log.info("daemon.draining", open_requests=parts.service.open_count)
        drained = asyncio.create_task(parts.service.drain(self.settings.limits.drain_timeout_s))
        at_once = asyncio.create_task(self._stop_now.wait())
        await _first_of(drained, at_once)
        at_once.cancel()
        if not drained.done():
            parts.service.fail_open(DrainDeadlineError("the server was told to stop at once"))
            await drained

    def _take_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        event_loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            event_loop.add_signal_handler(number, self.request_stop)


class _Parts:
    """Everything that lives as long as the daemon runs, wired once."""

    def __init__(
        self, settings: Settings, load: Callable[[], Engine], clock: Clock, api_keys: ApiKeys
    ) -> None:
        self.metrics = Metrics()
        self.lifecycle = Lifecycle()
        self.lag = EventLoopLag(clock)
        fanout = Fanout(asyncio.get_running_loop(), [self.metrics])
        self.loop = EngineLoop(
            load=load,
            make_scheduler=lambda _engine: SingleFlightScheduler(_queue_limits(settings)),
            publish=fanout.publish,
            clock=clock,
        )
        self.service = GenerationService(
            loop=self.loop,
            fanout=fanout,
            lifecycle=self.lifecycle,
            limits=GenerationLimits(
                max_tokens_default=settings.limits.max_tokens_default,
                max_n=settings.limits.max_n,
            ),
            clock=clock,
            observers=[self.metrics, RequestLog()],
        )
        context = ServerContext(
            service=self.service,
            loop=self.loop,
            metrics=self.metrics,
            clock=clock,
            settings=settings,
            versions=installed_versions(),
        )
        self.app = create_app(context, api_keys)
        self._watch()

    def announce(self, engine: Engine) -> None:
        """Export what is only known once the model is loaded."""
        model = engine.model
        self.metrics.set_info(
            "machd_model_info",
            model=model.model_id,
            architecture=model.architecture,
            kv_cache_kind=model.cache.kind.value,
            dtype=model.dtype,
            backend=model.backend,
        )

    def _watch(self) -> None:
        """Point the gauges at what they show."""
        metrics, loop = self.metrics, self.loop
        versions = installed_versions()
        metrics.set_info(
            "machd_build_info",
            version=versions.machd,
            mlx=versions.mlx or "",
            mlx_lm=versions.mlx_lm or "",
            python=platform.python_version(),
        )
        metrics.watch_state(lambda: self.lifecycle.state)
        metrics.watch_decode_mode(lambda: DecodeMode.SINGLE)
        metrics.watch("machd_requests_running", lambda: loop.snapshot.running_count)
        metrics.watch("machd_requests_waiting", lambda: loop.snapshot.waiting_count)
        metrics.watch("machd_active_loops", lambda: loop.snapshot.active_loops)
        metrics.watch("machd_slots", lambda: loop.snapshot.running_count, state="occupied")
        metrics.watch("machd_slots", lambda: 1 - loop.snapshot.running_count, state="free")
        metrics.watch(
            "machd_kv_cache_bytes", lambda: loop.snapshot.memory.kv_used_bytes, state="used"
        )
        metrics.watch("machd_engine_heartbeat_age_seconds", lambda: loop.heartbeat_age_s)
        metrics.watch("machd_event_loop_lag_seconds", lambda: self.lag.last_s)
        for kind in ("active", "peak", "cache"):
            metrics.watch("machd_mlx_memory_bytes", self._memory_reader(kind), kind=kind)

    def _memory_reader(self, kind: str) -> Callable[[], float]:
        return lambda: float(getattr(self.loop.snapshot.memory, f"{kind}_bytes"))


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _queue_limits(settings: Settings) -> QueueLimits:
    limits = settings.limits
    return QueueLimits(
        max_queue=limits.max_queue,
        max_queue_tokens=limits.max_queue_tokens,
        queue_timeout_s=limits.queue_timeout_s,
        request_timeout_s=limits.request_timeout_s,
    )


def _check_exposure(host: str, api_keys: ApiKeys) -> None:
    """Refuse to listen beyond this machine without keys.

    Raises:
        ListenError: That was asked for.
    """
    if host.startswith("unix:") or host == "localhost" or api_keys.is_required:
        return
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ListenError(
            f"server.host {host} can be reached from other machines; set auth.api_keys_file first, "
            "or listen on 127.0.0.1"
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
