"""``machd model list`` and ``machd model remove``: the models on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from machd.admin.config import AdminConfig
from machd.admin.models import AdminModel, AdminModelList
from machd.cli.ctl_client import AdminClient
from machd.cli.ctl_target import listening_clients, target_options
from machd.cli.ctl_text import say, say_json
from machd.engine.loading import embedded
from machd.engine.loading.hub_cache import (
    cached_repository,
    download_lock,
    hub_cache,
    list_repositories,
)
from machd.errors import ConflictError, MachdError, ModelNotFoundError
from machd.gguf_parts import gguf_files, gguf_name
from machd.served.model_files import FoundModel, ModelFilesKind, discover
from machd.settings.problems import shortened
from machd.settings.sources import SettingsSources, process_environ
from machd.user_directories import user_cache_directory

_Kind = Literal["embedded", "hub", "directory"]


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine, perhaps in part.

    Attributes:
        present: Something of it is here.
        complete: Nothing of it is missing.
        path: As `machd serve` takes it, or where the part that is here lies; None where nothing is.
        size_bytes: What it takes on the disk, other revisions and parts of files with it.
        repository: Its directory in a hub's cache, which has the files that a snapshot only links to.
    """

    id: str
    kind: _Kind
    present: bool
    complete: bool
    path: str | None
    size_bytes: int
    repository: Path | None = None

    def shown(self) -> dict[str, object]:
        """Return what is printed as JSON."""
        return {name: value for name, value in asdict(self).items() if name != "repository"}


@click.command("list", short_help="List the models on this machine.")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="Settings file, whose models.directory is listed too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_models(config_path: Path | None, *, as_json: bool) -> None:
    """List the models on this machine: the embedded default, the hub's cache and models.directory."""
    models = list(_local_models(_directory(config_path)))
    if as_json:
        say_json({"models": [one.shown() for one in models]})
        return
    for one in models:
        size = f", {one.size_bytes / 1e9:.2f} GB" if one.present else ""
        state = "" if one.complete or not one.present else ", incomplete"
        say(f"{one.id}  ({one.kind}{size}{state})")
        pulled = "" if one.kind == "embedded" else f" {one.id}"
        if one.complete:
            say(f"  {one.path}")
        elif one.present:
            say(f"  {one.path}; `machd model pull{pulled}` fetches the rest")
        else:
            say("  not here; `machd model pull` fetches it")


@click.command(short_help="Delete a model's files from this machine.")
@click.argument("name", metavar="NAME")
@click.option("--yes", is_flag=True, help="Do not ask.")
@target_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON; goes with --yes.")
def remove(name: str, *, yes: bool, as_json: bool) -> None:
    """Delete what `machd model list` shows as NAME: its files of every revision.

    A model that a running daemon serves is not deleted, nor one that is being fetched.
    """
    config_path: Path | None = click.get_current_context().meta.get("machd.ctl.config")
    found = [one for one in _local_models(_directory(config_path)) if one.id == name]
    removed = next((one for one in found if one.present), None)
    if removed is None or removed.path is None:
        raise ModelNotFoundError(
            f"no model {shortened(name)} is on this machine; `machd model list` shows those that are"
        )
    if as_json and not yes:
        raise click.UsageError("--json goes with --yes: nobody is there to be asked")
    directory = _what_is_deleted(removed)
    _check_unserved(removed)
    size = f"{removed.size_bytes / 1e9:.2f} GB"
    if not yes:
        click.confirm(f"Delete {directory} and free {size}?", abort=True)
    if removed.repository is not None:
        with download_lock(removed.repository.parent, removed.id) as is_ours:
            if not is_ours:
                raise ConflictError(f"{removed.id} is being fetched; stop that first")
            _delete(directory)
    else:
        _delete(directory)
    if as_json:
        say_json({"removed": removed.id, "path": str(directory), "freed_bytes": removed.size_bytes})
    else:
        say(f"deleted {directory}: {size} are free again")


def _directory(config_path: Path | None) -> Path | None:
    settings = SettingsSources(config_path, process_environ(), {}).load().settings
    directory = settings.models.directory
    return None if directory is None else Path(directory).expanduser()


def _local_models(directory: Path | None) -> Iterator[LocalModel]:
    path = embedded.locate(user_cache_directory(process_environ()))
    is_here = path is not None
    size_bytes = embedded.EMBEDDED_SIZE_BYTES if is_here else 0
    shown = str(path) if is_here else None
    yield LocalModel(
        embedded.EMBEDDED_MODEL_ID,
        "embedded",
        present=is_here,
        complete=is_here,
        path=shown,
        size_bytes=size_bytes,
    )
    yield from _hub_models(hub_cache())
    if directory is not None:
        with suppress(OSError):
            for found in discover(directory):
                if not found.path.resolve().is_relative_to(hub_cache().resolve()):
                    yield _found_model(found)


def _found_model(found: FoundModel) -> LocalModel:
    size_bytes = found.size_bytes
    repository = _repository(found)
    if repository is not None:
        size_bytes = cached_repository(repository).size_bytes
    return LocalModel(
        found.name,
        "directory",
        present=True,
        complete=True,
        path=str(found.path),
        size_bytes=size_bytes,
        repository=repository,
    )


def _repository(found: FoundModel) -> Path | None:
    """Return the directory of a model of a hub cache, with all of its files; None for any other."""
    if found.kind not in {ModelFilesKind.HUB_SNAPSHOT, ModelFilesKind.HUB_GGUF}:
        return None
    return next(one.parent for one in found.path.parents if one.name == "snapshots")


def _hub_models(cache: Path) -> Iterator[LocalModel]:
    snapshots: dict[str, Path] = {}
    with suppress(OSError):  # nothing was ever fetched
        snapshots = {
            one.name: one.path for one in discover(cache) if one.kind is ModelFilesKind.HUB_SNAPSHOT
        }
    for one in list_repositories(cache):
        path = snapshots.get(one.model)
        if path is None and one.ggufs and not one.is_being_fetched:
            firsts = [path for path in one.ggufs if gguf_name(path).number == 1]
            path = firsts[0] if len(firsts) == 1 else one.ggufs[0].parent
        place = str(path or one.directory)
        yield LocalModel(
            one.model,
            "hub",
            present=True,
            complete=path is not None,
            path=place,
            size_bytes=one.size_bytes,
            repository=one.directory,
        )


def _what_is_deleted(model: LocalModel) -> Path:
    assert model.path is not None, "it is here"
    return model.repository or Path(model.path)


def _delete(path: Path) -> None:
    """Delete a file, with its other parts, or a directory; of a link the link alone."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            for file in gguf_files(path):
                file.unlink()
            path.with_name(path.name + ".stamp").unlink(missing_ok=True)
    except OSError as error:
        raise ConflictError(f"cannot delete {path}: {error.strerror}") from error


def _check_unserved(model: LocalModel) -> None:
    """Check that no daemon serves a model.

    Raises:
        ConflictError: One does, or one is there and does not say what it serves.
    """
    try:
        serving = next((one for one in listening_clients() if _serves(one, model)), None)
    except MachdError as error:
        raise ConflictError(
            f"nothing was deleted: whether a daemon serves {model.id} cannot be told: {error.message}"
        ) from error
    if serving is not None:
        raise ConflictError(
            f"the daemon at {serving.address} serves {model.id}; take it out of its settings, or stop it, first"
        )


def _serves(client: AdminClient, model: LocalModel) -> bool:
    served = client.ask("GET", "/admin/models", AdminModelList).models
    config = client.ask("GET", "/admin/config", AdminConfig)
    return any(_is_it(model, one) for one in served) or _is_named(model, config)


def _is_it(model: LocalModel, served: AdminModel) -> bool:
    """Return True if what a daemon serves has the name of a model, or lies where it does."""
    if model.kind == "embedded":
        return served.path in {None, model.id} or _lies_in(model, served.path)
    return model.id in {served.name, *served.aliases, served.path} or _lies_in(model, served.path)


def _is_named(model: LocalModel, config: AdminConfig) -> bool:
    """Return True if the settings of a daemon name a model: one that could not be loaded yet, too."""
    named = {config.settings.get("model", {}).get("path")}
    for name, table in config.settings.get("models", {}).items():
        if isinstance(table, dict):
            path = table.get("path") or table.get("model", {}).get("path")
            named.add(path or name)
    places = {str(one) for one in named if one is not None}
    return model.id in places or any(_lies_in(model, one) for one in places)


def _lies_in(model: LocalModel, path: str | None) -> bool:
    if path is None:
        return False
    assert model.path is not None, "it is here"
    place = Path(path).expanduser().resolve()
    own = (Path(model.path).resolve(), _what_is_deleted(model).resolve())
    return any(place.is_relative_to(one) for one in own)
