"""The parts of all models in the front: those of the start, and what other settings add, change and remove.

A change comes in two steps, as every change of settings. :meth:`PartsOfModels.prepare` finds out which models there are to
be and may refuse them; :meth:`PartsOfModels.take_on` serves them. A model whose change needs another load is replaced by
another one of its name: answers that run end on the old one, and requests that come get the new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from machd.compose_model import ModelParts, Shared
from machd.errors import RestartRequiredError
from machd.generations.service import GenerationService
from machd.link.port import OpenEngine
from machd.served.model_set import ModelToServe, find_models, models_to_serve
from machd.served.named_model import NamedModel
from machd.served.served_models import ServedModels
from machd.served.turns import ModelState
from machd.settings.keys import changed_keys, changed_names, dotted_table
from machd.settings.model import Settings


@dataclass(slots=True)
class _Served:
    """A model that is served, with what was asked for when it was last changed."""

    parts: ModelParts
    asked: ModelToServe


class PartsOfModels:
    """The parts of every model. Lives on the event loop.

    Attributes:
        services: What opens the generations of each model, those of models that leave among them.
    """

    def __init__(
        self, settings: Settings, shared: Shared, open_engine: OpenEngine, models: ServedModels
    ) -> None:
        """Make those that the settings name; nothing runs yet.

        Raises:
            SettingsError: A directory of models cannot be read.
        """
        self._settings = settings
        self._shared = shared
        self._open_engine = open_engine
        self._models = models
        self._served: dict[str, _Served] = {}
        self._leaving: list[ModelParts] = []
        self._services: dict[NamedModel, GenerationService] = {}
        self.services: Mapping[NamedModel, GenerationService] = self._services
        self.take_on(settings, models_to_serve(settings, find_models(settings)))

    def __getitem__(self, name: str) -> ModelParts:
        """Return the parts of the model that is served under a name."""
        return self._served[name].parts

    @property
    def default(self) -> ModelParts:
        """The default model's."""
        return self[self._models.default.name]

    @property
    def asked(self) -> tuple[ModelToServe, ...]:
        """The models that are served, as the settings name them, the default one first."""
        return tuple(one.asked for one in self._served.values())

    @property
    def is_one(self) -> bool:
        """Whether there is one model, which lives as long as the daemon."""
        return self._models.is_one

    def prepare(self, settings: Settings) -> tuple[ModelToServe, ...]:
        """Return the models that there are to be, the default one first; directories are looked through again.

        Raises:
            SettingsError: A directory cannot be read.
            RestartRequiredError: One model would become several, or several one.
        """
        models = models_to_serve(settings, find_models(settings))
        if models[0].is_one != self.is_one:
            names = {
                dotted_table(one)
                for one in (*settings.models.tables, *self._settings.models.tables)
            }
            changed = tuple(one for one in changed_names(self._settings, settings) if one in names)
            raise RestartRequiredError(changed or ("models.directory",))
        return models

    def take_on(self, settings: Settings, models: tuple[ModelToServe, ...]) -> None:
        """Serve these models from now on.

        New ones are made first: if that fails, nothing has changed.
        """
        made = self._all_made([one for one in models if self._needs_load(one)])
        served = {
            one.name: _Served(
                made[one.name] if one.name in made else self._served[one.name].parts, one
            )
            for one in models
        }
        for one in models:
            if one.name not in made:
                _live_by(self._served[one.name], one)
        to_load = {
            name
            for name in made
            if name in self._served and _is_loaded(self._served[name].parts.model)
        }
        before, self._served, self._settings = self._served, served, settings
        self._leaving += [
            one.parts for name, one in before.items() if name not in served or name in made
        ]
        for parts in self._leaving:
            if parts.model.name in made:
                parts.be_replaced()
        self._services |= {one.model: one.service for one in made.values()}
        self._models.serve(one.parts.model for one in served.values())
        if before:
            to_load |= {one.name for one in self._models.to_load_first()} & made.keys()
            for name in to_load:
                made[name].model.want().add_done_callback(_read)

    def _needs_load(self, model: ModelToServe) -> bool:
        """Whether a model is a new one, or differs in what only another load can change."""
        now = self._served.get(model.name)
        if now is None:
            return True
        changed = changed_keys(now.asked.settings, model.settings)
        return model.found != now.asked.found or not all(key.is_live for key in changed)

    def _all_made(self, models: Sequence[ModelToServe]) -> dict[str, ModelParts]:
        """Make the parts of new models, or of none."""
        made = dict[str, ModelParts]()
        try:
            for one in models:
                made[one.name] = self._made(one)
        except BaseException:
            for parts in made.values():
                parts.forget(has_heir=self._has_heir(parts))
            raise
        return made

    def _made(self, model: ModelToServe) -> ModelParts:
        return ModelParts(
            model.name,
            model.settings,
            self._shared,
            self._open_engine,
            residence=model.residence,
            is_one=model.is_one,
            models=self._models,
            files=model.files,
            on_gone=self._gone,
        )

    def _gone(self, parts: ModelParts) -> None:
        """Forget a model that has left, once its last answer has ended."""
        self._leaving.remove(parts)
        del self._services[parts.model]
        parts.forget(has_heir=self._has_heir(parts))

    def _has_heir(self, parts: ModelParts) -> bool:
        """Whether another model goes by the same name."""
        others = (*(one.parts for one in self._served.values()), *self._leaving)
        return any(one.metrics is parts.metrics for one in others)


def _live_by(served: _Served, model: ModelToServe) -> None:
    """Have a model live by other settings of its own, all of them live ones."""
    parts = served.parts
    settings, old = model.settings, parts.model.settings
    parts.model.settings = settings
    in_force = parts.model.settings_in_force
    has_config = parts.model.is_one or parts.model.claim.holds_memory
    if _read_by_config(settings) != _read_by_config(old):
        if has_config:
            parts.change_config(in_force)
        else:
            parts.served.link.set_limits(in_force)  # its next process begins with them
    # Afterwards and at once: another config may have to wait for a step.
    if _read_by_engine(settings) != _read_by_engine(old):
        parts.served.link.set_limits(in_force)
    if model.residence != served.asked.residence:  # else what a client has asked for holds on
        parts.model.live(model.residence)


def _is_loaded(model: NamedModel) -> bool:
    return model.state in {ModelState.LOADING, ModelState.READY}


def _read(loaded: asyncio.Future[None]) -> None:
    """Note that a load has ended; why it failed is logged where it does."""
    if not loaded.cancelled():
        loaded.exception()


def _read_by_config(settings: Settings) -> tuple[object, ...]:
    """Return the settings whose change needs a new scheduler config."""
    return settings.continuous_batching, settings.speculation


def _read_by_engine(settings: Settings) -> tuple[object, ...]:
    """Return the settings that the engine takes on as they are."""
    return settings.cache, settings.limits, settings.logging
