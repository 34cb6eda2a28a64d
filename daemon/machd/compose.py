"""Settings to the parts of a running daemon: the only module that knows every one of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from litestar.types import ASGIApp

from machd import __version__
from machd.admin.app import create_admin_app
from machd.admin.context import AdminContext
from machd.admin.event_feed import EventFeed
from machd.admin.token import AdminToken
from machd.capabilities.verdict import Support
from machd.capabilities.versions import Versions
from machd.clock import Clock
from machd.dialects.app import AppSwitch, create_app
from machd.engine.protocol.engine import Engine, ModelDescription
from machd.engine.protocol.media import MediaBounds
from machd.engine_process.loop import EngineLoop
from machd.engine_process.startup_guard import NOTHING_MEASURED, Measures, OnStart, StartupGuard
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
from machd.process.configuration import Configuration
from machd.process.lifecycle import Lifecycle
from machd.scheduler.admission import Batching, KvBudget, KvPolicy
from machd.scheduler.config import SchedulerConfig, continuous, single_flight
from machd.scheduler.events import DecodeMode, Event
from machd.scheduler.prefix_cache import PrefixCache
from machd.scheduler.prefix_limits import PrefixLimits
from machd.scheduler.scheduler import Scheduler
from machd.scheduler.waiting import QueueLimits
from machd.served.kv_memory import effective_budget_bytes, prefix_limits, prefix_shape
from machd.served.speculation_mode import draft_policy
from machd.served.throughput import Throughput
from machd.settings.batching import ContinuousBatchingSettings
from machd.settings.model import Settings
from machd.settings.models import ModelsSettings
from machd.settings.sources import LoadedSettings, SettingsSources
from machd.telemetry.gauges import watch_gauges
from machd.telemetry.lag import EventLoopLag
from machd.telemetry.logs import RequestLog, SchedulerLog, configure_logs
from machd.telemetry.metrics import Metrics
from machd.telemetry.served_model import ServedModel
from machd.telemetry.tracing import tracers

Access = Callable[[Settings], ApiKeys]
"""Reads who may ask under some settings; refuses those under which nobody may be let in."""


def installed_versions() -> Versions:
    """Return the installed versions of machd and of the packages that it was measured with."""
    return Versions(
        machd=__version__, mlx=installed_version("mlx"), mlx_lm=installed_version("mlx-lm")
    )


class Parts:
    """Everything that lives as long as the daemon runs, wired once, on the event loop."""

    def __init__(  # noqa: PLR0913 - one argument for each thing that comes from outside
        self,
        sources: SettingsSources,
        loaded: LoadedSettings,
        load: Callable[[], Engine],
        clock: Clock,
        *,
        admit: Access,
        is_exposed: bool = False,
        measures: Measures = NOTHING_MEASURED,
    ) -> None:
        """Wire them; nothing runs yet.

        Args:
            sources: Where a reload reads settings.
            loaded: Settings, checked.
            load: Makes the engine; called on the engine thread.
            clock: Reads time.
            admit: Reads the API keys, for these settings and for later ones.
            is_exposed: Whether other machines can reach the public port.
            measures: Find out what the model can do; called on the engine thread.

        Raises:
            SettingsError, ListenError: The daemon may not listen like that, an extra is not installed, or
                the limit of open files has no room for ``limits.max_connections``.
        """
        settings = loaded.settings
        self._clock = clock
        self._event_loop = asyncio.get_running_loop()
        self._admit = admit
        self._in_force = settings
        self._available_bytes: int | None = None
        self._has_prefixes = False
        self._is_exposed = is_exposed
        self._open_requests = OpenRequests()
        self.max_connections = fit_connections(
            settings.limits.max_connections, other_files=open_files(settings.kv_events)
        )
        self.configuration = Configuration(sources, loaded, self._prepare, clock)
        self.metrics = Metrics()
        self.lifecycle = Lifecycle()
        self.lag = EventLoopLag(clock)
        self.throughput = Throughput(clock)
        self.feed = EventFeed(clock)
        self.tracers = tracers(settings.tracing.otlp_endpoint, clock)
        fanout = Fanout(
            self._event_loop, [self.metrics, SchedulerLog(), self.throughput, self.feed]
        )
        self.loop = EngineLoop(
            load=load,
            make_scheduler=lambda engine: Scheduler(
                self._scheduler_config(engine), self._prefixes(engine)
            ),
            publish=fanout.publish,
            clock=clock,
            adopt=self._adopt,
            probe=StartupGuard(
                on_start=OnStart(settings.probe.on_start),
                is_batching_asked=settings.continuous_batching.enabled,
                measures=measures,
                clock=clock,
            ),
        )
        self.served = ServedModel(self.loop, self.configuration, self.metrics, self.feed.on_verdict)
        self.service = GenerationService(
            loop=self.loop,
            fanout=fanout,
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
        watch_gauges(
            self.metrics,
            loop=self.loop,
            lifecycle=self.lifecycle,
            lag=self.lag,
            configuration=self.configuration,
            responses=self._responses,
            in_flight=lambda: self._open_requests.count,
            open_generations=lambda: self.service.open_count,
            versions=_version_labels(installed_versions()),
        )

    def admin_app(self, token: AdminToken) -> ASGIApp:
        """The application for operators."""
        return create_admin_app(
            AdminContext(
                service=self.service,
                loop=self.loop,
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
                decide=self.served.decision,
                client_names=lambda: self._client_names,
                probe=lambda: self._change_config(measure=True),
            ),
            token,
        )

    def _scheduler_config(
        self, engine: Engine, settings: Settings | None = None
    ) -> SchedulerConfig:
        """Return the scheduler config that the settings ask for and the model allows; on the engine thread."""
        settings = settings or self.configuration.settings
        limits = _queue_limits(settings)
        verdicts, decision = self.served.judge(engine.model, settings)
        drafts = draft_policy(settings.speculation, engine.model, verdicts)
        if decision.active is DecodeMode.BATCHED:
            batching = batching_of(settings.continuous_batching, engine.model)
            return continuous(
                limits, batching, drafts, experts_on_disk=engine.model.experts_on_disk
            )
        return single_flight(limits, drafts, experts_on_disk=engine.model.experts_on_disk)

    def _prefixes(self, engine: Engine) -> PrefixCache | None:
        """Return the prefix cache, if it is wanted and works; on the engine thread."""
        self._available_bytes = engine.memory().available_bytes
        self._has_prefixes = True  # from now on changes are told; those before are read here
        section = self.configuration.settings.cache
        verdicts, _ = self.served.judge(engine.model, self.configuration.settings)
        if not section.prefix or verdicts.prefix_cache.support is not Support.SUPPORTED:
            return None
        limits = self._prefix_limits(engine.model, self.configuration.settings)
        return PrefixCache(
            prefix_shape(section, engine.model),
            limits,
            engine.saved_blocks(),
            observer=None if self.kv_events is None else self.kv_events.observer(),
        )

    def _prefix_limits(self, model: ModelDescription, settings: Settings) -> PrefixLimits:
        """Return the limits of blocks: nothing where they turned out to be wrong."""
        limits = prefix_limits(settings.cache, self._available_bytes)
        verdicts, _ = self.served.judge(model, settings)
        is_right = verdicts.prefix_cache.support is Support.SUPPORTED
        return limits if is_right else replace(limits, max_bytes=0)

    def _adopt(self, engine: Engine, scheduler: Scheduler, changed: frozenset[str]) -> list[Event]:
        """Schedule by what was measured beside the daemon; on the engine thread."""
        events: list[Event] = []
        config = self._scheduler_config(engine)
        if not scheduler.is_configured_as(config):
            engine.reset(max_rows=config.slot_count)
            events = scheduler.apply_config(config, self._clock.monotonic_s())
        if scheduler.prefix_reading is None:
            scheduler.set_prefix_cache(self._prefixes(engine))
        else:
            scheduler.set_prefix_limits(self._prefix_limits(engine.model, self._in_force))
        with contextlib.suppress(RuntimeError):  # the event loop has closed
            self._event_loop.call_soon_threadsafe(self.served.announce_changes, changed)
        return events

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
            # Before the model is loaded there is nothing to limit, and what there will be reads these.
            if settings.cache != old.cache and self._has_prefixes:
                model = self.service.model
                self.loop.set_prefix_limits(self._prefix_limits(model, settings))
            # Afterwards and at once: another config may have to wait for long answers.
            if settings.limits != old.limits:
                self.loop.set_queue_limits(_queue_limits(settings))

        return take_on

    def _change_config(
        self, settings: Settings | None = None, *, measure: bool = False
    ) -> Future[None]:
        """Schedule as the settings say, and then say what came of it. On the event loop."""
        done = self.loop.change_config(
            lambda engine: self._scheduler_config(engine, settings), measure=measure
        )

        def announce(done: Future[None]) -> None:
            if done.exception() is None:  # what it was is in the log already
                with contextlib.suppress(RuntimeError):  # the event loop has closed
                    self._event_loop.call_soon_threadsafe(self.served.announce)

        done.add_done_callback(announce)
        return done

    def _make_app(self, settings: Settings, api_keys: ApiKeys, max_connections: int) -> ASGIApp:
        context = ServerContext(
            service=self.service,
            clock=self._clock,
            settings=settings,
            versions=installed_versions(),
            responses=self._responses,
            names=_model_names(settings.models, is_exposed=self._is_exposed),
        )
        return create_app(
            context,
            self.loop,
            self.metrics,
            api_keys,
            open_requests=self._open_requests,
            max_connections=max_connections,
        )


def _arranged_by(settings: Settings) -> tuple[object, ...]:
    """Return the settings whose change needs a new scheduler config."""
    return settings.continuous_batching, settings.speculation


def batching_of(section: ContinuousBatchingSettings, model: ModelDescription) -> Batching:
    """The settings' batching in the scheduler's terms, for one model on one device."""
    chunk_tokens = section.prefill_chunk_tokens
    return Batching(
        max_b=section.max_b,
        window_s=section.window_ms / 1000,
        prefill_chunk_tokens=None if chunk_tokens == "auto" else chunk_tokens,
        coalesce=section.coalesce,
        prefill_share=section.prefill_share,
        kv=KvBudget(
            budget_bytes=effective_budget_bytes(section.kv_budget_gb, model.device_memory_bytes),
            bytes_per_token=model.cache.bytes_per_token,
            bytes_per_sequence=model.cache.bytes_per_sequence,
            policy=KvPolicy(section.kv_policy),
            has_length_classes=model.has_length_classes,
            shares_prefixes=model.shares_prefixes,
        ),
    )


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


def _queue_limits(settings: Settings) -> QueueLimits:
    limits = settings.limits
    return QueueLimits(
        max_queue=limits.max_queue,
        max_queue_tokens=limits.max_queue_tokens,
        queue_timeout_s=limits.queue_timeout_s,
        request_timeout_s=limits.request_timeout_s,
    )
