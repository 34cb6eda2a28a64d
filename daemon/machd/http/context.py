"""Context of the endpoints: the running parts and the settings they obey."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from litestar.types import Scope

from machd.capabilities.versions import Versions
from machd.clock import Clock
from machd.generations.prompt_fingerprints import PromptFingerprints
from machd.generations.response_store import ResponseStore
from machd.generations.service import GenerationService
from machd.http.asked_models import (
    AskedModel,
    WeightedAdapter,
    asked_adapters,
    check_takes_adapters,
    find_asked,
)
from machd.http.authentication import require_operator
from machd.http.leases import asked_autoload, asker_of, keep, note_model
from machd.http.model_names import ModelNames
from machd.request.adapter import Adapter, NumberedAdapter
from machd.served.adapter_places import AdapterToServe
from machd.served.adapter_readings import NO_ADAPTER_FILES
from machd.served.adapter_set import AdapterSet, combined
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
        adapters: Those that requests may name.
        model: The model that the request asks for; None before that is known (:meth:`leased`).
        own_service: What opens that model's generations; the model may leave before the request has ended.
        chosen: Adapters that compute the request's answer, as their files are now; empty for the model itself.
        adapter_name: Name of the adapter that the request asks for in place of a model; empty where it asks for a model.
    """

    clock: Clock
    settings: Settings
    versions: Versions
    responses: ResponseStore
    models: ServedModels
    services: Mapping[NamedModel, GenerationService]
    names: ModelNames = field(default_factory=ModelNames)
    downloads: Downloads = field(default_factory=Downloads)
    fingerprints: PromptFingerprints = field(default_factory=PromptFingerprints)
    adapters: AdapterSet = field(default_factory=lambda: AdapterSet(NO_ADAPTER_FILES))
    model: NamedModel | None = None
    own_service: GenerationService | None = None
    chosen: tuple[Adapter, ...] = ()
    adapter_name: str = ""

    @property
    def served(self) -> ServedModel:
        """The model that the request asks for; the default one before that is known."""
        return (self.model or self.models.default).served

    @property
    def service(self) -> GenerationService:
        """The service that opens that model's generations."""
        return self.own_service or self.services[self.models.default]

    @property
    def answer_name(self) -> str:
        """The ``model`` of the request's answer: the adapter's name, or the model's id."""
        return self.adapter_name or self.served.model.model_id

    @property
    def has_operators(self) -> bool:
        """True if requests may add and remove models, or load and unload them."""
        section = self.settings.models
        return not self.models.is_one or section.hub_cache or section.directory is not None

    def find(self, asked: str | None) -> NamedModel:
        """Return the model that a request asks for, or whose adapter it asks for.

        Raises:
            ModelNotServedError: It names one that is not served.
            InvalidRequestError: It names none, and not every name is accepted.
        """
        return self.models[self.find_asked(asked).model_name]

    def find_asked(self, asked: str | None) -> AskedModel:
        """Return what a request asks for: a model, or an adapter of one.

        Raises:
            ModelNotServedError, InvalidRequestError: As of :meth:`find`.
        """
        default = self.models.default.shown_name
        found = find_asked(self.names, self.adapters, asked, default)
        if found.model_name not in self.models:
            # These names are of a request that came before a reload took the model away.
            raise ModelNames(others={one.name: one.name for one in self.models}).refusal(default)
        return found

    def name_of(self, adapter: AdapterToServe) -> str:
        """Return the name that lists and answers have for an adapter: its own, unless a model has that name."""
        default = self.models.default.shown_name
        if self.names.named(adapter.name, default) is None:
            return adapter.name
        return f"{self.models[adapter.model_name].shown_name}:{adapter.name}"

    async def leased(
        self,
        scope: Scope,
        asked: str | None,
        on_wait: Callable[[], None] = lambda: None,
        *,
        numbered: Sequence[NumberedAdapter] | None = None,
    ) -> ServerContext:
        """Return the context of the model that a request asks for, which is held until its answer has ended.

        Its adapters are the one that is asked for, or the ``numbered`` ones that it lists beside the model.

        ``on_wait`` is called if it has to be waited for. ``?autoload=true|false`` in the request says whether it is loaded
        if it has to be, as in llama.cpp's router.

        Raises:
            ModelNotServedError, InvalidRequestError: As of :meth:`find`.
            OperatorRequiredError: The request wants it loaded where requests load none.
            AdapterError: The adapter's files cannot be used, or not with this model.
            UnavailableError: It is not loaded, and is not in time.
        """
        found = self.find_asked(asked)
        model = self.models[found.model_name]
        note_model(scope, model.name)
        adapters = asked_adapters(self.adapters, found, numbered)
        if not model.is_ready:
            await self._chosen(adapters)  # what cannot be used loads no model
        loads = None if self.models.is_one else asked_autoload(scope)
        if loads and not self.settings.models.autoload:
            require_operator(scope)
        names = "+".join(one.adapter.name for one in adapters) or None
        asker = None if model.is_ready else asker_of(scope, names)
        keep(scope, await self.models.lease(model, on_wait, loads=loads, asker=asker))
        context = self.of(model)
        if not adapters:
            return context
        check_takes_adapters(context.served)
        chosen = await self._chosen(adapters)
        name = "" if found.adapter is None else self.name_of(found.adapter)
        return replace(context, chosen=chosen, adapter_name=name)

    async def _chosen(self, adapters: Sequence[WeightedAdapter]) -> tuple[Adapter, ...]:
        """Return adapters with the content that their files have now."""
        return combined([await self.adapters.resolve(one.adapter, one.scale) for one in adapters])

    def of(self, model: NamedModel) -> ServerContext:
        """Return the context of a model."""
        return replace(self, model=model, own_service=self.services[model])
