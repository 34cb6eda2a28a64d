"""Context of the admin endpoints: the running parts and the settings in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from machd.admin.event_feed import EventFeed
from machd.admin.file_sizes import FileSizes
from machd.admin.finished_requests import FinishedRequests
from machd.admin.memory_history import MemoryHistory
from machd.admin.overview_feed import OverviewFeed
from machd.capabilities.versions import Versions
from machd.clock import Clock
from machd.generations.open_generations import OpenGenerations
from machd.generations.response_store import ResponseStore
from machd.generations.service import GenerationService
from machd.http.asked_models import check_takes_adapters, find_asked
from machd.http.context import ServerContext
from machd.http.model_names import ModelNames
from machd.process.configuration import ChangeKind, Configuration, LastChange
from machd.process.lifecycle import Lifecycle
from machd.request.adapter import Adapter
from machd.served.adapter_places import AdapterToServe
from machd.served.adapter_set import AdapterSet
from machd.served.downloads import Downloads
from machd.served.model_set import ModelToServe
from machd.served.named_model import NamedModel
from machd.served.served_model import ServedModel
from machd.served.served_models import ServedModels
from machd.served.throughput import Throughput
from machd.settings.model import Settings
from machd.telemetry.lag import EventLoopLag
from machd.telemetry.log_ring import LogRing
from machd.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class AdminContext:
    """Made once by ``compose.Parts``, read by every handler.

    Attributes:
        model: The model that the request is about: the default one unless it names another (:meth:`asked`).
        adapter: The adapter of the model that the request names; None where it names the model.
        names: Reads the names under which models are found.
        to_serve: Reads which models there are, by name.
        services: What opens the generations of each model; those of models that come and go are in it, too.
        client_names: Reads the names of the API keys; none where requests need no key.
        finished: The last finished requests.
        memory: Memory now and over the last hour.
        log: The last events of the log.
        overview: Tells watchers of the whole daemon.
        sizes: Of models' files.
        probe: Measures a model at the next idle moment and then schedules as the verdict allows.
    """

    model: NamedModel
    open_generations: OpenGenerations
    models: ServedModels
    services: Mapping[NamedModel, GenerationService]
    names: Callable[[], ModelNames]
    to_serve: Callable[[], Mapping[str, ModelToServe]]
    lifecycle: Lifecycle
    metrics: Metrics
    clock: Clock
    lag: EventLoopLag
    configuration: Configuration
    throughput: Throughput
    feed: EventFeed
    responses: ResponseStore
    versions: Versions
    started_unix_s: float
    downloads: Downloads
    adapters: AdapterSet
    client_names: Callable[[], frozenset[str]]
    finished: FinishedRequests
    memory: MemoryHistory
    log: LogRing
    overview: OverviewFeed
    sizes: FileSizes
    probe: Callable[[NamedModel], Future[None]]
    adapter: AdapterToServe | None = None

    @property
    def served(self) -> ServedModel:
        """The request's model, as handlers ask about it."""
        return self.model.served

    @property
    def service(self) -> GenerationService:
        """The service that opens generations of the request's model."""
        return self.services[self.model]

    @property
    def settings(self) -> Settings:
        """The settings in force for the request's model."""
        return self.model.settings

    def find(self, asked: str) -> NamedModel:
        """Return the model of a name or an alias.

        Raises:
            ModelNotServedError: It is none's.
        """
        return self.models[self.names().find(asked, self.models.default.shown_name)]

    def asked(self, asked: str | None) -> AdminContext:
        """Return the context of the model that a request names, with the adapter if it names one, or of the default one.

        Raises:
            ModelNotServedError: As of :meth:`find`.
        """
        if not asked:
            return replace(self, model=self.models.default)
        default = self.models.default.shown_name
        found = find_asked(self.names(), self.adapters, asked, default)
        return replace(self, model=self.models[found.model_name], adapter=found.adapter)

    async def chosen(self) -> tuple[Adapter, ...]:
        """Return the request's adapter with the content that its files have now; the model is loaded.

        Raises:
            AdapterError, UnsupportedParameterError: It cannot be used, or not with this model.
        """
        if self.adapter is None:
            return ()
        check_takes_adapters(self.served)
        return (await self.adapters.resolve(self.adapter),)

    def forget_pins(self, change: LastChange) -> None:
        """Pin what the settings pin, and serve the adapters that they name, once they have been read again."""
        if change.kind is ChangeKind.RELOAD and change.is_successful:
            self.models.forget_pins()
            self.adapters.forget_unloads()

    def public(self) -> ServerContext:
        """Return the context of endpoints that both listeners have, with the settings of now."""
        return ServerContext(
            clock=self.clock,
            settings=self.configuration.settings,
            versions=self.versions,
            responses=self.responses,
            models=self.models,
            services=self.services,
            names=self.names(),
            adapters=self.adapters,
        )
