"""Settings to the parts of a running daemon: the only module that knows every one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVarTuple, Unpack

from litestar.types import ASGIApp

from machd import __version__
from machd.admin.app import create_admin_app
from machd.admin.context import AdminContext
from machd.admin.event_feed import EventFeed
from machd.admin.token import AdminToken
from machd.capabilities.versions import Versions
from machd.clock import Clock
from machd.dialects.app import AppSwitch, create_app
from machd.engine.protocol.media import MediaBounds
from machd.generations.decodings import MediaRules
from machd.generations.fanout import Fanout
from machd.generations.media_fetch import FetchRules
from machd.generations.response_store import ResponseStore
from machd.generations.service import GenerationLimits, GenerationService
from machd.http.authentication import ApiKeys
from machd.http.context import ServerContext
from machd.http.file_limit import fit_connections
from machd.http.gate import OpenRequests
from machd.http.model_names import ModelNames
from machd.installed import installed_version
from machd.kv_events.publishing import open_files, open_kv_events
from machd.link.block_events import KvEvent
from machd.link.port import OpenEngine, RestartReason
from machd.process.configuration import Configuration
from machd.process.lifecycle import Lifecycle
from machd.scheduler.events import Event
from machd.served.served_model import ServedModel
from machd.served.throughput import Throughput
from machd.settings.model import Settings
from machd.settings.models import ModelsSettings
from machd.settings.sources import LoadedSettings, SettingsSources
from machd.telemetry.announcements import Announcements
from machd.telemetry.gauges import watch_daemon_gauges, watch_model_gauges
from machd.telemetry.lag import EventLoopLag
from machd.telemetry.logs import RequestLog, SchedulerLog, configure_logs
from machd.telemetry.metrics import Metrics
from machd.telemetry.tracing import tracers

_Arguments = TypeVarTuple("_Arguments")

Access = Callable[[Settings], ApiKeys]
"""Reads who may ask under some settings; refuses those under which nobody may be let in."""


def installed_versions() -> Versions:
    """Return the installed versions of machd and of the packages that it was measured with."""
    return Versions(
        machd=__version__, mlx=installed_version("mlx"), mlx_lm=installed_version("mlx-lm")
    )


class Parts:
    """Everything that lives as long as the daemon runs, wired once, on the event loop."""

    def __init__(
        self,
        sources: SettingsSources,
        loaded: LoadedSettings,
        open_engine: OpenEngine,
        clock: Clock,
        *,
        admit: Access,
        is_exposed: bool = False,
    ) -> None:
        """Wire them; nothing runs yet.

        Args:
            sources: Where a reload reads settings.
            loaded: Settings, checked.
            open_engine: Makes the engine, which is told of these parts.
            clock: Reads time.
            admit: Reads the API keys, for these settings and for later ones.
            is_exposed: Whether other machines can reach the public port.

        Raises:
            SettingsError, ListenError: The daemon may not listen like that, an extra is not installed, or
                the limit of open files has no room for ``limits.max_connections``.
        """
        settings = loaded.settings
        self._clock = clock
        self._event_loop = asyncio.get_running_loop()
        self._admit = admit
        self._in_force = settings
        self._is_exposed = is_exposed
        self._open_requests = OpenRequests()
        self.max_connections = fit_connections(
            settings.limits.max_connections, other_files=open_files(settings.kv_events)
        )
        self.configuration = Configuration(sources, loaded, self._prepare, clock)
        self.metrics = Metrics()
        self.model_metrics = self.metrics.add_model()
        self.lifecycle = Lifecycle()
        self.lag = EventLoopLag(clock)
        self.throughput = Throughput(clock)
        self.feed = EventFeed(clock)
        self.tracers = tracers(settings.tracing.otlp_endpoint, clock)
        model_feed = self.feed.add_model(lambda: self.model_metrics.model_id)
        self._fanout = Fanout(
            self._event_loop,
            [
                self.model_metrics,
                SchedulerLog(lambda: self.model_metrics.model_id),
                self.throughput,
                model_feed,
            ],
        )
        self.engine = open_engine(settings, self)
        self.served = ServedModel(
            self.engine, lambda: self.configuration.settings, self.lifecycle.check_accepting
        )
        self.announcements = Announcements(
            self.served,
            lambda: self.configuration.settings,
            self.model_metrics,
            model_feed.on_verdict,
        )
        self.service = GenerationService(
            served=self.served,
            fanout=self._fanout,
            lifecycle=self.lifecycle,
            limits=_generation_limits(settings),
            clock=clock,
            observers=[self.metrics, RequestLog(), *self.tracers],
        )
        self._responses = ResponseStore(
            max_responses=settings.limits.max_stored_responses,
            max_bytes=settings.limits.max_stored_response_bytes,
        )
        api_keys = admit(settings)
        self._client_names = api_keys.names
        self.app = AppSwitch(self._make_app(settings, api_keys, self.max_connections))
        self.metrics.export_vllm_names(on=settings.metrics.vllm_names)
        # Last: it binds sockets and has to be closed.
        self.kv_events = open_kv_events(settings.kv_events, settings.cache, clock)
        watch_daemon_gauges(
            self.metrics,
            lifecycle=self.lifecycle,
            lag=self.lag,
            configuration=self.configuration,
            responses=self._responses,
            in_flight=lambda: self._open_requests.count,
            versions=_version_labels(installed_versions()),
        )
        watch_model_gauges(
            self.model_metrics,
            self.served,
            lambda: self.configuration.settings,
            open_generations=lambda: self.service.open_count,
        )

    def admin_app(self, token: AdminToken) -> ASGIApp:
        """The application for operators."""
        return create_admin_app(
            AdminContext(
                served=self.served,
                service=self.service,
                lifecycle=self.lifecycle,
                metrics=self.metrics,
                clock=self._clock,
                lag=self.lag,
                configuration=self.configuration,
                throughput=self.throughput,
                feed=self.feed,
                responses=self._responses,
                versions=installed_versions(),
                started_unix_s=self._clock.unix_s(),
                client_names=lambda: self._client_names,
                probe=lambda: self._change_config(measure=True),
            ),
            token,
        )

    def publish(self, events: list[Event]) -> None:
        """Hand the events of a step to their readers."""
        self._fanout.publish(events)

    def block_changed(self, event: KvEvent) -> None:
        """Publish a change of the blocks in memory."""
        if self.kv_events is not None:
            self.kv_events.put(event)

    def engine_ended(self, reason: RestartReason) -> None:
        """Count it, and tell routers until another process serves."""
        self._on_event_loop(self.lifecycle.restart)
        self._on_event_loop(self.model_metrics.count_restart, reason)

    def engine_served(self) -> None:
        """Tell routers that requests are computed again."""
        self._on_event_loop(self.lifecycle.restarted)

    def verdicts_changed(self, changed: frozenset[str]) -> None:
        """Announce what else the model can do now."""
        self._on_event_loop(self.announcements.announce_changes, changed)

    def _on_event_loop(
        self, call: Callable[[Unpack[_Arguments]], object], *arguments: *_Arguments
    ) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has closed
            self._event_loop.call_soon_threadsafe(call, *arguments)

    def _prepare(self, settings: Settings) -> Callable[[], None]:
        """Get ready what other settings need; see :data:`machd.process.configuration.Prepare`."""
        api_keys = self._admit(settings)
        max_connections = fit_connections(
            settings.limits.max_connections, other_files=open_files(settings.kv_events)
        )
        app = self._make_app(settings, api_keys, max_connections)

        def take_on() -> None:
            # Noted first: if something below fails, what was begun is what has to be put back.
            old, self._in_force = self._in_force, settings
            self.app.app, self._client_names = app, api_keys.names
            self.max_connections = max_connections
            self.service.set_limits(_generation_limits(settings))
            self._responses.set_bounds(
                max_responses=settings.limits.max_stored_responses,
                max_bytes=settings.limits.max_stored_response_bytes,
            )
            self.metrics.export_vllm_names(on=settings.metrics.vllm_names)
            if settings.logging != old.logging:
                configure_logs(level=settings.logging.level, log_format=settings.logging.format)
            if _arranged_by(settings) != _arranged_by(old):
                self._change_config(settings)
            # Afterwards and at once: another config may have to wait for a step.
            if _read_by_engine(settings) != _read_by_engine(old):
                self.engine.set_limits(settings)

        return take_on

    def _change_config(
        self, settings: Settings | None = None, *, measure: bool = False
    ) -> Future[None]:
        """Schedule as the settings say, and then say what came of it. On the event loop."""
        settings = settings or self.configuration.settings
        done = self.engine.change_config(settings, measure=measure)

        def announce(done: Future[None]) -> None:
            if done.exception() is None:  # what it was is in the log already
                self._on_event_loop(self.announcements.announce)

        done.add_done_callback(announce)
        return done

    def _make_app(self, settings: Settings, api_keys: ApiKeys, max_connections: int) -> ASGIApp:
        context = ServerContext(
            served=self.served,
            service=self.service,
            clock=self._clock,
            settings=settings,
            versions=installed_versions(),
            responses=self._responses,
            names=_model_names(settings.models, is_exposed=self._is_exposed),
        )
        return create_app(
            context,
            self.metrics,
            api_keys,
            open_requests=self._open_requests,
            max_connections=max_connections,
        )


def _arranged_by(settings: Settings) -> tuple[object, ...]:
    """Return the settings whose change needs a new scheduler config."""
    return settings.continuous_batching, settings.speculation


def _read_by_engine(settings: Settings) -> tuple[object, ...]:
    """Return the settings that the engine takes on as they are."""
    return settings.cache, settings.limits, settings.logging


def _version_labels(versions: Versions) -> dict[str, str]:
    return {
        "version": versions.machd,
        "mlx": versions.mlx or "",
        "mlx_lm": versions.mlx_lm or "",
    }


def _generation_limits(settings: Settings) -> GenerationLimits:
    limits = settings.limits
    return GenerationLimits(
        max_tokens_default=limits.max_tokens_default,
        clamps_max_tokens=limits.max_tokens_policy == "clamp",
        max_n=limits.max_n,
        max_queue=limits.max_queue,
        max_requests_per_key=limits.max_requests_per_key,
        max_tokens_per_minute_per_key=limits.max_tokens_per_minute_per_key,
        shares_prefixes=settings.cache.namespace == "shared",
        refuses_ignored_keywords=settings.structured_output.strict,
        max_images=settings.vision.max_images,
        omits_tool_media=settings.vision.in_tool_results == "omit",
        media=MediaRules(
            FetchRules.of(settings.vision),
            MediaBounds(
                max_pixels=settings.vision.max_image_pixels,
                max_frames=settings.vision.max_frames,
                max_decode_s=settings.vision.max_decode_s,
            ),
        ),
    )


def _model_names(section: ModelsSettings, *, is_exposed: bool) -> ModelNames:
    accepts_any = not is_exposed if section.accept_any is None else section.accept_any
    return ModelNames(section.aliases, accepts_any=accepts_any)
