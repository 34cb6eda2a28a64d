"""A daemon in this process, on its own thread and event loop, with any engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from machd.clock import Clock
from machd.daemon import Daemon
from machd.engine.adapters.adapter_files import adapter_digest, describe_adapter
from machd.engine.protocol.engine import Engine
from machd.engine_process.startup_guard import NOTHING_MEASURED, Measures
from machd.link.port import OpenEngine
from machd.served.adapter_readings import AdapterFiles
from machd.settings.sources import SettingsSources
from support.clocks.polling import CEILING_S
from support.daemon.daemon_reports import reported
from support.daemon.hosted_engine import hosted
from support.engines.fake_engine import FakeEngine

_DRAIN_S = 2.0
"""The time that requests may take after their test is over; then they are ended."""


class RunningDaemon:
    """A context manager: inside it the daemon is ready at ``url``."""

    def __init__(
        self,
        make_engine: Callable[[], Engine] = FakeEngine,
        flags: Mapping[str, object] | None = None,
        *,
        config_path: Path | None = None,
        environ: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        wait_until_ready: bool = True,
    ) -> None:
        """Prepare a daemon on a free port; ``flags`` are settings by dotted key.

        It has no admin listener unless ``flags`` name one, and reads the machine's clocks unless
        ``clock`` is given.
        """
        self._make_engine = make_engine
        self._clock = clock
        self._sources = SettingsSources(
            config_path,
            environ or {},
            {"server.port": 0, "admin.listen": "off", **(flags or {})},
        )
        self._loaded = self._sources.load()
        self._wait_until_ready = wait_until_ready
        self._ready = threading.Event()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._daemon: Daemon | None = None
        self.url = ""
        self.admin_url: str | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="test-daemon", daemon=True)

    def __enter__(self) -> Self:
        """Start and wait until requests are taken; raises what kept the daemon from it."""
        self._thread.start()
        assert self._ready.wait(CEILING_S), "the daemon did not become ready"
        if self.error is not None:
            raise self.error
        self._reported = reported(self)
        self._reported.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Stop, at once if need be."""
        self._reported.__exit__(kind, error, traceback)
        self.stop()
        self._thread.join(_DRAIN_S)
        if self._thread.is_alive():
            self.stop()
        self._thread.join(CEILING_S)
        assert not self._thread.is_alive(), "the daemon did not stop"

    def stop(self) -> None:
        """Stop as SIGTERM does."""
        if self._event_loop is not None and self._daemon is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                self._event_loop.call_soon_threadsafe(self._daemon.request_stop)

    def log_tail(self, lines: int) -> Sequence[str]:  # noqa: ARG002 - of the protocol
        """Nothing: pytest captures what this process writes."""
        return ()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; returns whether it came."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _open_engine(self) -> OpenEngine:
        """Return the factory of the engine, by default on a thread of this process."""
        return hosted(self._make_engine, clock=self._clock, measures=self._measures())

    def _measures(self) -> Measures:
        """Return the measures of the model; none by default."""
        return NOTHING_MEASURED

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - tests look at it
            self.error = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._daemon = Daemon(
            self._sources,
            self._loaded,
            self._open_engine(),
            adapter_files=AdapterFiles(describe_adapter, adapter_digest),
            clock=self._clock,
            on_ready=lambda _url, _engine: self._ready.set(),
        )
        self.url = self._daemon.url
        self.admin_url = self._daemon.admin_url
        if not self._wait_until_ready:
            self._ready.set()
        await self._daemon.run()
