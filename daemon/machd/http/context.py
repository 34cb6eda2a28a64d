"""Context of the endpoints: the running parts and the settings they obey."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from litestar.types import Scope

from machd.capabilities.versions import Versions
from machd.clock import Clock
from machd.generations.response_store import ResponseStore
from machd.generations.service import GenerationService
from machd.http.authentication import require_operator
from machd.http.leases import asked_autoload, keep, note_model
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
        services: What opens the generations of each model; those of models that come and go are in it, too.
        model: The model that the request asks for; None before that is known (:meth:`leased`).
        own_service: What opens that model's generations; the model may leave before the request has ended.
    """

    clock: Clock
    settings: Settings
    versions: Versions
    responses: ResponseStore
    models: ServedModels
    services: Mapping[NamedModel, GenerationService]
    names: ModelNames = field(default_factory=ModelNames)
    downloads: Downloads = field(default_factory=Downloads)
    model: NamedModel | None = None
    own_service: GenerationService | None = None

    @property
    def served(self) -> ServedModel:
        """The model that the request asks for; the default one before that is known."""
        return (self.model or self.models.default).served

    @property
    def service(self) -> GenerationService:
        """What opens that model's generations."""
        return self.own_service or self.services[self.models.default]

    @property
    def has_operators(self) -> bool:
        """Whether requests may change which models there are, or which are loaded."""
        section = self.settings.models
        return not self.models.is_one or section.hub_cache or section.directory is not None

    def find(self, asked: str | None) -> NamedModel:
        """Return the model that a request asks for.

        Raises:
            ModelNotServedError: It names one that is not served.
            InvalidRequestError: It names none, and not every name is accepted.
        """
        default = self.models.default.shown_name
        name = self.names.find(asked, default)
        if name not in self.models:
            # These names are of a request that came before a reload took the model away.
            raise ModelNames(others={one.name: one.name for one in self.models}).refusal(default)
        return self.models[name]

    async def leased(
        self, scope: Scope, asked: str | None, on_wait: Callable[[], None] = lambda: None
    ) -> ServerContext:
        """Return the context of the model that a request asks for, which is held until its answer has ended.

        ``on_wait`` is called if it has to be waited for. ``?autoload=true|false`` in the request says whether it is loaded
        if it has to be, as in llama.cpp's router.

        Raises:
            ModelNotServedError, InvalidRequestError: As of :meth:`find`.
            OperatorRequiredError: The request wants it loaded where requests load none.
            UnavailableError: It is not loaded, and is not in time.
        """
        model = self.find(asked)
        note_model(scope, model.name)
        loads = None if self.models.is_one else asked_autoload(scope)
        if loads and not self.settings.models.autoload:
            require_operator(scope)
        keep(scope, await self.models.lease(model, on_wait, loads=loads))
        return self.of(model)

    def of(self, model: NamedModel) -> ServerContext:
        """Return the context of a model."""
        return replace(self, model=model, own_service=self.services[model])
