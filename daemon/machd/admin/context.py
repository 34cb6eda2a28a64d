"""Context of the admin endpoints: the running parts and the settings in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from machd.admin.event_feed import EventFeed
from machd.capabilities.versions import Versions
from machd.clock import Clock
from machd.generations.open_generations import OpenGenerations
from machd.generations.response_store import ResponseStore
from machd.generations.service import GenerationService
from machd.http.context import ServerContext
from machd.process.configuration import Configuration
from machd.process.lifecycle import Lifecycle
from machd.served.downloads import Downloads
from machd.served.named_model import NamedModel
from machd.served.served_model import ServedModel
from machd.served.served_models import ServedModels
from machd.served.throughput import Throughput
from machd.telemetry.lag import EventLoopLag
from machd.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class AdminContext:
    """Made once by ``compose.Parts``, read by every handler.

    Attributes:
        services: What opens the generations of each model; those of models that come and go are in it, too.
        client_names: Reads the names of the API keys; none where requests need no key.
        probe: Measures the model at the next idle moment and then schedules as the verdict allows.
    """

    open_generations: OpenGenerations
    models: ServedModels
    services: Mapping[NamedModel, GenerationService]
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
    client_names: Callable[[], frozenset[str]]
    probe: Callable[[], Future[None]]

    @property
    def served(self) -> ServedModel:
        """The default model."""
        return self.models.default.served

    @property
    def service(self) -> GenerationService:
        """What opens its generations."""
        return self.services[self.models.default]

    def public(self) -> ServerContext:
        """Return the context of endpoints that both listeners have, with the settings of now."""
        return ServerContext(
            clock=self.clock,
            settings=self.configuration.settings,
            versions=self.versions,
            responses=self.responses,
            models=self.models,
            services=self.services,
        )
