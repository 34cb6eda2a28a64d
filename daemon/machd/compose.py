"""Settings to the parts of a running daemon: the only module that knows every one of them."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable
from importlib import metadata

from machd import __version__
from machd.api.capabilities import Versions
from machd.clock import Clock
from machd.engine.protocol import Engine
from machd.http.app import create_app
from machd.http.authentication import ApiKeys
from machd.http.context import ServerContext
from machd.scheduler.single_flight import SingleFlightScheduler
from machd.scheduler.waiting import QueueLimits
from machd.serving.fanout import Fanout
from machd.serving.lifecycle import Lifecycle
from machd.serving.loop import EngineLoop
from machd.serving.service import GenerationLimits, GenerationService
from machd.settings.model import Settings
from machd.telemetry.lag import EventLoopLag
from machd.telemetry.logs import RequestLog
from machd.telemetry.metrics import Metrics

__all__ = ["Parts", "installed_versions"]


def installed_versions() -> Versions:
    """Of machd and what it was measured with; read from the installed packages."""
    return Versions(machd=__version__, mlx=_version("mlx"), mlx_lm=_version("mlx-lm"))


class Parts:
    """Everything that lives as long as the daemon runs, wired once, on the event loop."""

    def __init__(
        self, settings: Settings, load: Callable[[], Engine], clock: Clock, api_keys: ApiKeys
    ) -> None:
        """Wire them; nothing runs yet.

        Args:
            settings: Validated settings.
            load: Makes the engine; called on the engine thread.
            clock: Reads time.
            api_keys: Who may ask.
        """
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
                max_sequences=settings.limits.max_queue + 1,
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
        metrics.watch_decode_mode(lambda: loop.snapshot.mode)
        metrics.watch("machd_requests_running", lambda: loop.snapshot.running_count)
        metrics.watch("machd_requests_waiting", lambda: loop.snapshot.waiting_count)
        metrics.watch("machd_active_loops", lambda: loop.snapshot.active_loops)
        metrics.watch("machd_slots", lambda: loop.snapshot.running_count, state="occupied")
        metrics.watch("machd_slots", self._free_slots, state="free")
        metrics.watch(
            "machd_kv_cache_bytes", lambda: loop.snapshot.memory.kv_used_bytes, state="used"
        )
        metrics.watch("machd_engine_heartbeat_age_seconds", lambda: loop.heartbeat_age_s)
        metrics.watch("machd_event_loop_lag_seconds", lambda: self.lag.last_s)
        for kind in ("active", "peak", "cache"):
            metrics.watch("machd_mlx_memory_bytes", self._memory_reader(kind), kind=kind)

    def _free_slots(self) -> float:
        snapshot = self.loop.snapshot
        return snapshot.slot_count - snapshot.running_count

    def _memory_reader(self, kind: str) -> Callable[[], float]:
        return lambda: float(getattr(self.loop.snapshot.memory, f"{kind}_bytes"))


def _queue_limits(settings: Settings) -> QueueLimits:
    limits = settings.limits
    return QueueLimits(
        max_queue=limits.max_queue,
        max_queue_tokens=limits.max_queue_tokens,
        queue_timeout_s=limits.queue_timeout_s,
        request_timeout_s=limits.request_timeout_s,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
