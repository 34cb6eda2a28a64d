"""One process from its first listening to its last answer."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import structlog

from machd.clock import Clock, SystemClock
from machd.compose import Parts
from machd.engine.protocol import Engine
from machd.errors import (
    DrainDeadlineError,
    EngineFaultError,
    FaultError,
    ListenError,
    MachdError,
)
from machd.http.admin.token import AdminToken
from machd.http.authentication import ApiKeys
from machd.http.server import HttpServer
from machd.http.sockets import Listener, listen, listen_admin
from machd.serving.decode_mode import DecodeModeDecision
from machd.serving.lifecycle import State
from machd.serving.notify import ServiceNotifier
from machd.serving.startup_guard import Measure, nothing_known
from machd.settings.model import Settings
from machd.settings.sources import LoadedSettings, SettingsSources

__all__ = ["Daemon"]

_ENGINE_JOIN_S = 5.0
"""How long a step in flight may take to end when the daemon leaves."""

_SERVER_JOIN_S = 10.0

_LAST_ANSWER_S = 1.0
"""How long clients get to read why their answers end, when nothing else is waited for."""


class Daemon:
    """One process: a listener, a server, an engine thread. Runs once."""

    def __init__(  # noqa: PLR0913 - what the command line hands down, each by its name
        self,
        sources: SettingsSources,
        loaded: LoadedSettings,
        load: Callable[[], Engine],
        *,
        clock: Clock | None = None,
        on_ready: Callable[[str, Engine], None] = lambda _url, _engine: None,
        measure: Measure = nothing_known,
        recall: Measure = nothing_known,
    ) -> None:
        """Read the keys and bind the addresses, so that mistakes show before the model loads.

        Args:
            sources: Where a reload reads settings; its variables are the process's, with the
                sockets and credentials that a service manager hands over.
            loaded: What was read from there.
            load: Makes the engine; called on the engine thread.
            clock: Reads time; the machine's clocks unless given.
            on_ready: Told the URL and the engine once requests are taken.
            measure: Finds out what the loaded model can do, in a few seconds; called on the
                engine thread where the settings ask for it. What it raises is logged.
            recall: Tells what was found out before, at once.

        Raises:
            ListenError: An address is taken, or is public while no API key is required.
            SettingsError: The key file is wrong.
        """
        settings = loaded.settings
        self._sources = sources
        self._loaded = loaded
        self._load = load
        self._clock = clock or SystemClock()
        self._on_ready = on_ready
        self._measure = measure
        self._recall = recall
        self._decode_mode: DecodeModeDecision | None = None
        self._log = structlog.get_logger("machd.daemon")
        self._notifier = ServiceNotifier(sources.environ, self._clock)
        self._listener = listen(settings.server.host, settings.server.port, environ=sources.environ)
        try:
            self._admit(settings)
            self._admin_listener = listen_admin(settings.admin.listen)
            self._admin_token = self._read_admin_token(settings)
        except MachdError:
            self._listener.close()
            raise
        self._listener.open()
        if self._admin_listener is not None:
            self._admin_listener.open()
        self._stop_requests = 0
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._reloads: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Where the daemon listens."""
        return self._listener.url

    @property
    def admin_url(self) -> str | None:
        """Where operators are answered; None where nobody is."""
        return None if self._admin_listener is None else self._admin_listener.url

    @property
    def decode_mode(self) -> DecodeModeDecision | None:
        """How sequences are decoded, and why; None until the model is loaded."""
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
        try:
            parts = Parts(
                self._sources,
                self._loaded,
                self._load,
                self._clock,
                admit=self._admit,
                measure=self._measure,
                recall=self._recall,
            )
            await self._run(parts)
        finally:
            for listener in self._listeners:
                listener.close()

    @property
    def _listeners(self) -> tuple[Listener, ...]:
        both = (self._listener, self._admin_listener)
        return tuple(listener for listener in both if listener is not None)

    def _admit(self, settings: Settings) -> ApiKeys:
        """Who may ask under these settings.

        Raises:
            ListenError: Other machines can reach the daemon, and it asks nobody for a key.
            SettingsError: The key file is wrong.
        """
        api_keys = ApiKeys.of(settings, self._sources.environ)
        if self._listener.is_exposed and not api_keys.is_required:
            raise ListenError(
                f"{self._listener.url} can be reached from other machines; set "
                "auth.api_keys_file first, or listen on 127.0.0.1"
            )
        return api_keys

    def _servers(self, parts: Parts) -> dict[HttpServer, Listener]:
        """A server for each listener, the public one first."""
        servers = {HttpServer(parts.app): self._listener}
        if self._admin_listener is not None and self._admin_token is not None:
            servers[HttpServer(parts.admin_app(self._admin_token))] = self._admin_listener
        return servers

    def _read_admin_token(self, settings: Settings) -> AdminToken | None:
        """What operators have to show; None where there is no admin listener.

        Raises:
            SettingsError: The file is wrong.
        """
        if self._admin_listener is None:
            return None
        return AdminToken.of(settings, self._sources.environ, self._admin_listener)

    async def _run(self, parts: Parts) -> None:
        servers = self._servers(parts)
        serving = [
            asyncio.create_task(server.serve(sockets=[listener.socket]))
            for server, listener in servers.items()
        ]
        lag = asyncio.create_task(parts.lag.watch())
        self._take_signals(parts)
        parts.loop.start()
        self._log.info("daemon.listening", url=self.url, admin_url=self.admin_url)
        try:
            await self._load_model(parts)
            if not self._stop.is_set():
                await self._wait_for_end(parts, serving)
            await self._drain(parts)
        finally:
            lag.cancel()
            parts.lifecycle.become(State.STOPPED)
            parts.loop.stop(DrainDeadlineError("the server has stopped"))
            for server in servers:
                server.should_exit = True
            await asyncio.wait(serving, timeout=_SERVER_JOIN_S)
            for server in servers:
                server.cut_connections()
            parts.service.close()
            if parts.loop.loaded.done():
                await asyncio.to_thread(parts.loop.join, _ENGINE_JOIN_S)
            self._log.info("daemon.stopped")

    async def _load_model(self, parts: Parts) -> None:
        """Wait for the model, or for a stop.

        Raises:
            MachdError: It could not be loaded.
        """
        loaded = asyncio.wrap_future(parts.loop.loaded)
        stop = asyncio.create_task(self._stop.wait())
        await _first_of(loaded, stop)
        stop.cancel()
        if not loaded.done():
            return
        try:
            engine = loaded.result()
        except MachdError:
            raise
        except Exception as error:
            parts.lifecycle.become(State.FAILED)
            self._log.critical("model.load_failed", exc_info=error)
            raise EngineFaultError("the model could not be loaded; the log says why") from error
        self._decode_mode = parts.announce(engine)
        parts.lifecycle.become(State.READY)
        self._notifier.ready()
        self._log.info("daemon.ready", url=self.url, model=engine.model.model_id)
        self._on_ready(self.url, engine)

    async def _wait_for_end(self, parts: Parts, serving: list[asyncio.Task[None]]) -> None:
        """Until a stop is asked for; an engine or a server that fails ends the daemon.

        Raises:
            FaultError: One did.
        """
        stop = asyncio.create_task(self._stop.wait())
        failed = asyncio.create_task(self._engine_failed(parts))
        await _first_of(stop, *serving, failed)
        stop.cancel()
        failed.cancel()
        for server in serving:
            if server.done():
                raise FaultError("the HTTP server has stopped") from server.exception()
        if failed.done():
            await self._give_up(parts)

    async def _engine_failed(self, parts: Parts) -> None:
        """Return once the engine thread has ended, or hangs."""
        finished = asyncio.wrap_future(parts.loop.finished)
        stalled = asyncio.create_task(self._stalled(parts))
        try:
            await _first_of(finished, stalled)
        finally:
            stalled.cancel()
            if finished.done() and not finished.cancelled():
                finished.exception()  # looked at: who ends the daemon asks the loop's own future

    async def _give_up(self, parts: Parts) -> None:
        """Tell everyone that the engine is gone.

        Raises:
            EngineFaultError: Always.
        """
        if parts.lifecycle.state is State.READY:
            parts.lifecycle.become(State.FAILED)
        fault = EngineFaultError("the engine has stopped; the server is restarting")
        parts.service.fail_open(fault)
        await parts.service.drain(_LAST_ANSWER_S)
        finished = parts.loop.finished
        raise fault from finished.exception() if finished.done() else None

    async def _stalled(self, parts: Parts) -> None:
        """Return once a step has taken longer than any step may."""
        while parts.loop.heartbeat_age_s <= (limit_s := _stall_limit_s(parts)):
            await asyncio.sleep(min(1.0, limit_s / 4))  # looked at: a hung thread sets no event
        parts.metrics.count_fault("engine")
        self._log.critical("engine.stalled", heartbeat_age_s=round(parts.loop.heartbeat_age_s, 1))

    async def _drain(self, parts: Parts) -> None:
        """Take nothing new and let the open generations end, up to the deadline.

        Raises:
            EngineFaultError: The engine stopped meanwhile.
        """
        parts.lifecycle.become(State.DRAINING)
        self._log.info("daemon.draining", open_requests=parts.service.open_count)
        timeout_s = parts.configuration.settings.limits.drain_timeout_s
        self._notifier.stopping(timeout_s=timeout_s)
        drained = asyncio.create_task(parts.service.drain(timeout_s))
        at_once = asyncio.create_task(self._stop_now.wait())
        failed = asyncio.create_task(self._engine_failed(parts))
        await _first_of(drained, at_once, failed)
        at_once.cancel()
        failed.cancel()
        if failed.done():
            drained.cancel()
            await self._give_up(parts)
        if not drained.done():
            parts.service.fail_open(DrainDeadlineError("the server was told to stop at once"))
            await asyncio.wait({drained}, timeout=_LAST_ANSWER_S)
            drained.cancel()

    def _take_signals(self, parts: Parts) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        event_loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            event_loop.add_signal_handler(number, self.request_stop)
        event_loop.add_signal_handler(signal.SIGHUP, self.request_reload, parts)

    def request_reload(self, parts: Parts) -> None:
        """Read the settings again; what comes of it is logged. Call it on the event loop."""
        task = asyncio.create_task(self._reload(parts))
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def _reload(self, parts: Parts) -> None:
        self._notifier.reloading()
        # A refusal is logged and counted where it is made; the old settings stay.
        with contextlib.suppress(MachdError):
            await parts.configuration.reload()
        self._notifier.ready()


def _stall_limit_s(parts: Parts) -> float:
    return parts.configuration.settings.engine.stall_timeout_s


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
