"""Context of the endpoints: the running parts and the settings they obey."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from litestar.types import Scope

from machd.capabilities.versions import Versions
from machd.clock import Clock
from machd.generations.response_store import ResponseStore
from machd.generations.service import GenerationService
from machd.http.leases import keep
from machd.http.model_names import ModelNames
from machd.served.downloads import Downloads
from machd.served.named_model import NamedModel
from machd.served.served_model import ServedModel
from machd.served.served_models import ServedModels
from machd.settings.model import Settings


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Made once by ``compose.Parts``, read by every handler.

    Attributes:
        served: The model that the request asks for; the default one before that is known (:meth:`leased`).
        service: Opens that model's generations.
        services: Those of all models, by name.
    """

    served: ServedModel
    service: GenerationService
    clock: Clock
    settings: Settings
    versions: Versions
    responses: ResponseStore
    models: ServedModels
    services: Mapping[str, GenerationService]
    names: ModelNames = field(default_factory=ModelNames)
    downloads: Downloads = field(default_factory=Downloads)

    def find(self, asked: str | None) -> NamedModel:
        """Return the model that a request asks for.

        Raises:
            ModelNotServedError: It names one that is not served.
            InvalidRequestError: It names none, and not every name is accepted.
        """
        return self.models[self.names.find(asked, self.models.default.shown_name)]

    async def leased(self, scope: Scope, asked: str | None) -> ServerContext:
        """Return the context of the model that a request asks for, which is held until its answer has ended.

        Raises:
            ModelNotServedError, InvalidRequestError: As of :meth:`find`.
            UnavailableError: It is not loaded, and is not in time.
        """
        model = self.find(asked)
        keep(scope, await self.models.lease(model))
        return self.of(model)

    def of(self, model: NamedModel) -> ServerContext:
        """Return the context of a model."""
        service = self.services[model.name]
        return replace(self, served=model.served, service=service)
