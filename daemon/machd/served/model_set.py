"""Which models a daemon serves, as its settings say and its directories hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from machd.errors import SettingsError
from machd.served.model_files import FoundModel, ModelFiles, discover, files_at
from machd.served.residence import Residence
from machd.settings.model import Settings
from machd.settings.models import DEFAULT_NAME


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """One model.

    Attributes:
        settings: Its own.
        aliases: Other names for it.
        is_one: There is no other.
        found: Where it lies, if it was found in a directory.
    """

    name: str
    settings: Settings
    residence: Residence
    aliases: tuple[str, ...] = ()
    is_one: bool = False
    found: FoundModel | None = None

    @property
    def files(self) -> ModelFiles | None:
        """Its files as they are now, one of several models; None where they are not on this machine."""
        if self.found is not None:
            return ModelFiles(self.found.size_bytes, self.found.modified_unix_s)
        path = self.settings.model.path
        return None if self.is_one or path is None else files_at(Path(path))


def models_to_serve(
    settings: Settings, found: Mapping[str, FoundModel]
) -> tuple[ModelToServe, ...]:
    """Return the models that settings name, and those that were found; the default one first.

    The default model is the one of ``model.path``; where that is not set, the first table's, the first that was found, or
    the embedded one.

    Args:
        settings: Of the daemon.
        found: Models of its directories, by name.
    """
    section = settings.models
    models = list(_named(settings, found))
    is_default_named = any(one.settings.model.path == settings.model.path for one in models)
    if not models or (settings.model.path is not None and not is_default_named):
        residence = Residence(is_pinned=not models, ttl_s=section.ttl_s)
        alone = settings.model_copy(update={"models": section.model_copy(update={"tables": {}})})
        if models:
            alone = _apart(DEFAULT_NAME, alone)
        return (
            ModelToServe(DEFAULT_NAME, alone, residence, section.aliases, is_one=not models),
            *models,
        )
    first = next(
        (one for one in models if one.settings.model.path == settings.model.path), models[0]
    )
    return (first, *(one for one in models if one is not first))


def find_models(settings: Settings) -> dict[str, FoundModel]:
    """Look through the directories whose models are served; returns these by name.

    Raises:
        SettingsError: A directory cannot be read.
    """
    found: dict[str, FoundModel] = {}
    for key, directory in _directories(settings):
        try:
            models = discover(directory)
        except OSError as error:
            problem = f"{key}: {directory} cannot be read: {error.strerror}"
            raise SettingsError([problem]) from None
        found = {one.name: one for one in models} | found
    return found


def _directories(settings: Settings) -> Iterator[tuple[str, Path]]:
    section = settings.models
    if section.directory is not None:
        yield "models.directory", Path(section.directory).expanduser()
    if section.hub_cache:
        from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - takes a third of a second

        yield "models.hub_cache", Path(HF_HUB_CACHE)


def _named(settings: Settings, found: Mapping[str, FoundModel]) -> Iterator[ModelToServe]:
    section = settings.models
    for name, table in section.tables.items():
        place = found.get(name) if table.path is None else None
        path = None if place is None else str(place.path)
        residence = Residence(
            table.pin,
            section.ttl_s if table.ttl_s is None else table.ttl_s,
            keeps_kv_budget="kv_budget_gb" in table.overrides.get("continuous_batching", {}),
        )
        own = _apart(name, settings.of_model(name, path=path))
        yield ModelToServe(name, own, residence, table.aliases, found=place)
    for name, one in found.items():
        if name not in section.tables:
            residence = Residence(ttl_s=section.ttl_s)
            own = _apart(name, settings.of_model(name, path=str(one.path)))
            yield ModelToServe(name, own, residence, found=one)


def _apart(name: str, settings: Settings) -> Settings:
    """Give one of several models a directory of its own for its blocks on disk."""
    cache = settings.cache
    if cache.disk_dir is None:
        return settings
    directory = Path(cache.disk_dir) / quote(name, safe="")
    own = cache.model_copy(update={"disk_dir": str(directory)})
    return settings.model_copy(update={"cache": own})
