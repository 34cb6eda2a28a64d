"""Settings to the parts of a running daemon: the only module that knows every one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from litestar.types import ASGIApp

from machd.admin.app import create_admin_app
from machd.admin.context import AdminContext
from machd.admin.event_feed import EventFeed
from machd.admin.file_sizes import FileSizes
from machd.admin.finished_requests import FinishedRequests
from machd.admin.memory_history import MemoryHistory
from machd.admin.overview_feed import OverviewFeed
from machd.admin.token import AdminToken
from machd.capabilities.versions import Versions, installed_versions
from machd.clock import Clock
from machd.compose_model import ModelParts, Shared
from machd.compose_models import PartsOfModels
from machd.dialects.app import AppSwitch, create_app
from machd.engine.protocol.downloads import Downloaded
from machd.engine.protocol.media import MediaBounds
from machd.errors import ConflictError
from machd.generations.decodings import MediaRules
from machd.generations.media_fetch import FetchRules
from machd.generations.open_generations import GenerationLimits, OpenGenerations
from machd.generations.prompt_fingerprints import PromptFingerprints
from machd.generations.response_store import ResponseStore
from machd.http.authentication import ApiKeys, HoldsToken
from machd.http.context import ServerContext
from machd.http.file_limit import fit_connections
from machd.http.gate import OpenRequests
from machd.http.model_names import ModelNames
from machd.kv_events.publisher import KvEventPublisher
from machd.kv_events.publishing import open_files, open_kv_events
from machd.link.port import OpenEngine
from machd.process.configuration import Configuration
from machd.process.lifecycle import Lifecycle
from machd.served.adapter_places import AdapterToServe, adapters_to_serve
from machd.served.adapter_readings import NO_ADAPTER_FILES, AdapterFiles
from machd.served.adapter_set import AdapterSet
from machd.served.downloads import Downloads
from machd.served.model_set import ModelToServe
from machd.served.served_models import ServedModels, Waiting
from machd.served.throughput import Throughput
from machd.served.turns import Rules
from machd.settings.keys import SettingKey
from machd.settings.model import Settings
from machd.settings.model_tables import default_names
from machd.settings.models import (
    DEFAULT_NAME,
    TABLE_SECTIONS,
    ModelsSettings,
    name_essence,
)
from machd.settings.sources import LoadedSettings, SettingsSources
from machd.telemetry.gauges import watch_daemon_gauges
from machd.telemetry.lag import EventLoopLag
from machd.telemetry.log_ring import LogRing
from machd.telemetry.logs import RequestLog, configure_logs
from machd.telemetry.metrics import Metrics
from machd.telemetry.tracing import tracers

Access = Callable[[Settings], ApiKeys]
"""Reads who may ask under some settings; refuses those under which nobody may be let in."""


class Parts:
    """Everything that lives as long as the daemon runs, wired once, on the event loop."""

    def __init__(  # noqa: PLR0913 - one argument for each thing from outside
        self,
        sources: SettingsSources,
        loaded: LoadedSettings,
        open_engine: OpenEngine,
        clock: Clock,
        *,
        admit: Access,
        adapter_files: AdapterFiles = NO_ADAPTER_FILES,
        is_exposed: bool = False,
        holds_admin_token: HoldsToken = lambda _: False,
        log: LogRing,
    ) -> None:
        """Wire them; nothing runs yet.

        Args:
            sources: Where a reload reads settings.
            loaded: Settings, checked.
            open_engine: Makes the engine, which is told of these parts.
            clock: Reads time.
            admit: Reads the API keys, for these settings and for later ones.
            adapter_files: Reads the files of adapters.
            is_exposed: Whether other machines can reach the public port.
            holds_admin_token: Whether a header holds the admin token.
            log: The last events of the log.

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
        self._holds_admin_token = holds_admin_token
        self._open_requests = OpenRequests()
        self.max_connections = fit_connections(
            settings.limits.max_connections, other_files=open_files(settings.kv_events)
        )
        self.configuration = Configuration(
            sources, loaded, self._prepare, clock, is_live=self._is_live
        )
        self.metrics = Metrics()
        self.lifecycle = Lifecycle()
        self.lag = EventLoopLag(clock)
        self.throughput = Throughput(clock)
        self.log = log
        self.models = ServedModels(_rules(settings), _waiting(settings), clock)
        self.overview = OverviewFeed(log, self.models.watched, self._is_active)
        self.finished = FinishedRequests(clock, self.overview.on_finished)
        self.feed = EventFeed(clock, self.overview.touch)
        self.tracers = tracers(settings.tracing.otlp_endpoint, clock)
        self.open_generations = OpenGenerations(
            lifecycle=self.lifecycle,
            limits=_generation_limits(settings),
            clock=clock,
            observers=[self.metrics, RequestLog(), self.finished, *self.tracers],
        )
        self._shared = Shared(
            open_generations=self.open_generations,
            configuration=self.configuration,
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            throughput=self.throughput,
            feed=self.feed,
            log=log,
            clock=clock,
            kv_events=lambda: self.kv_events,
        )
        self.memory = MemoryHistory(lambda: [one.served for one in self.models.with_leaving], clock)
        self.downloads = Downloads(self._on_pulled)
        self._parts_of_models = PartsOfModels(settings, self._shared, open_engine, self.models)
        self._responses = ResponseStore(
            max_responses=settings.limits.max_stored_responses,
            max_bytes=settings.limits.max_stored_response_bytes,
        )
        self._fingerprints = PromptFingerprints()
        api_keys = admit(settings)
        self._client_names = api_keys.names
        to_serve = self._parts_of_models.asked
        self.adapters = AdapterSet(adapter_files)
        self.adapters.take_on(settings.adapters, self._adapters(settings, to_serve))
        self.app = AppSwitch(self._make_app(settings, to_serve, api_keys, self.max_connections))
        self.metrics.export_vllm_names(on=settings.metrics.vllm_names)
        # Last: it binds sockets and has to be closed.
        self.kv_events: KvEventPublisher | None = open_kv_events(
            settings.kv_events, settings.cache, clock
        )
        watch_daemon_gauges(
            self.metrics,
            lifecycle=self.lifecycle,
            lag=self.lag,
            configuration=self.configuration,
            responses=self._responses,
            in_flight=lambda: self._open_requests.count,
            versions=_version_labels(installed_versions()),
        )

    def admin_app(self, token: AdminToken) -> ASGIApp:
        """The application for operators."""
        return create_admin_app(
            AdminContext(
                model=self.models.default,
                open_generations=self.open_generations,
                models=self.models,
                services=self._parts_of_models.services,
                names=lambda: _model_names(
                    self._in_force.models, self._parts_of_models.asked, accepts_any=False
                ),
                to_serve=lambda: {one.name: one for one in self._parts_of_models.asked},
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
                downloads=self.downloads,
                adapters=self.adapters,
                finished=self.finished,
                memory=self.memory,
                log=self.log,
                overview=self.overview,
                sizes=FileSizes(self._clock),
                client_names=lambda: self._client_names,
                probe=lambda model: self._parts_of_models[model.name].change_config(
                    model.settings_in_force, measure=True
                ),
            ),
            token,
        )

    @property
    def default(self) -> ModelParts:
        """The default model's."""
        return self._parts_of_models.default

    def _is_active(self) -> bool:
        """Return True while a request is open or a model loads."""
        is_loading = any(one.load_stage is not None for one in self.models)
        return bool(len(self.open_generations)) or bool(self.models.waiting_requests) or is_loading

    def _is_live(self, key: SettingKey) -> bool:
        """Whether another value of a key can be taken on; of several models each is loaded anew with what its load reads."""
        return key.is_live or (key.section in TABLE_SECTIONS and not self.models.is_one)

    async def _on_pulled(self, done: Downloaded) -> None:
        """Serve a model that has come, where a directory of the settings covers it.

        Raises:
            MachdError: It is not served, and why.
        """
        await self.configuration.renew()
        if not any(_is_it(one, done) for one in self._parts_of_models.asked):
            raise ConflictError(
                f"what is served of models.directory and models.hub_cache is not {done.path}; give it to the path of a "
                "table [models.NAME]"
            )

    def _prepare(self, settings: Settings) -> Callable[[], None]:
        """Get ready what other settings need; see :data:`machd.process.configuration.Prepare`."""
        api_keys = self._admit(settings)
        max_connections = fit_connections(
            settings.limits.max_connections, other_files=open_files(settings.kv_events)
        )
        to_serve = self._parts_of_models.prepare(settings)
        adapters = self._adapters(settings, to_serve)
        app = self._make_app(settings, to_serve, api_keys, max_connections)

        def take_on() -> None:
            # Noted first: if something below fails, what was begun is what has to be put back.
            old, self._in_force = self._in_force, settings
            self.app.app, self._client_names = app, api_keys.names
            self.max_connections = max_connections
            self.open_generations.set_limits(_generation_limits(settings))
            self._responses.set_bounds(
                max_responses=settings.limits.max_stored_responses,
                max_bytes=settings.limits.max_stored_response_bytes,
            )
            self.metrics.export_vllm_names(on=settings.metrics.vllm_names)
            if settings.logging != old.logging:
                section = settings.logging
                configure_logs(
                    level=section.level, log_format=section.format, on_event=self.log.add
                )
            self._parts_of_models.take_on(settings, to_serve)
            self.adapters.take_on(settings.adapters, adapters)
            self.models.set_rules(_rules(settings), _waiting(settings))

        return take_on

    def _adapters(
        self, settings: Settings, to_serve: Sequence[ModelToServe]
    ) -> tuple[AdapterToServe, ...]:
        """Find the adapters that there are to be.

        Raises:
            SettingsError: As of :func:`machd.served.adapter_places.adapters_to_serve`.
        """
        names = _model_names(settings.models, to_serve, accepts_any=False)
        # Its id is not known before it is loaded, and is the name of its files then.
        default = {name_essence(name) for name in default_names(settings)}

        def find_model(name: str) -> str | None:
            found = names.named(name, self.models.default.shown_name)
            return found or (DEFAULT_NAME if name_essence(name) in default else None)

        return adapters_to_serve(settings.adapters, find_model)

    def _make_app(
        self,
        settings: Settings,
        to_serve: Sequence[ModelToServe],
        api_keys: ApiKeys,
        max_connections: int,
    ) -> ASGIApp:
        context = ServerContext(
            clock=self._clock,
            settings=settings,
            versions=installed_versions(),
            responses=self._responses,
            fingerprints=self._fingerprints,
            models=self.models,
            services=self._parts_of_models.services,
            names=_model_names(
                settings.models,
                to_serve,
                accepts_any=_accepts_any(settings, to_serve, is_exposed=self._is_exposed),
            ),
            downloads=self.downloads,
            adapters=self.adapters,
        )
        return create_app(
            context,
            self.metrics,
            api_keys,
            open_requests=self._open_requests,
            max_connections=max_connections,
            holds_admin_token=self._holds_admin_token,
        )


def _is_it(model: ModelToServe, done: Downloaded) -> bool:
    """Return True if a model that is served is what has been fetched."""
    found = model.found
    if found is not None:
        if found.name != done.model and not found.name.startswith(f"{done.model}/"):
            return False
        here = Path(done.path).resolve()  # a snapshot, or its only file
        return here == found.path.resolve() or found.path.parent.resolve().is_relative_to(here)
    return model.settings.model.path in {done.model, done.path}


def _rules(settings: Settings) -> Rules:
    """The memory that models share."""
    section = settings.models
    budget_bytes = None if section.memory_gb == "auto" else round(section.memory_gb * 1e9)
    return Rules(budget_bytes, section.max_turn_s)


def _waiting(settings: Settings) -> Waiting:
    """Read from the settings how requests wait for a model."""
    return Waiting(loads=settings.models.autoload, max_wait_s=settings.limits.queue_timeout_s)


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
        max_inputs=limits.max_inputs,
        max_queue_tokens=limits.max_queue_tokens,
        truncates_inputs=limits.long_input_policy == "truncate",
        request_timeout_s=limits.request_timeout_s,
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


def _accepts_any(settings: Settings, models: Sequence[ModelToServe], *, is_exposed: bool) -> bool:
    """Return True if every unknown name means the default model."""
    if settings.models.accept_any is not None:
        return settings.models.accept_any
    # With several models, or adapters, an unknown name is more likely a mistake than a wish for the default one.
    has_adapters = bool(settings.adapters.tables) or settings.adapters.directory is not None
    return not is_exposed and models[0].is_one and not has_adapters


def _model_names(
    section: ModelsSettings, models: Sequence[ModelToServe], *, accepts_any: bool
) -> ModelNames:
    default, *others = models
    own = () if default.name == DEFAULT_NAME else (default.name,)
    return ModelNames(
        (*own, *section.aliases, *default.aliases),
        accepts_any=accepts_any,
        others={name: one.name for one in others for name in (one.name, *one.aliases)},
    )
