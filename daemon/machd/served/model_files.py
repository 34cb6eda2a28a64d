"""Models that lie in a directory: checkpoints, GGUF files, and snapshots of a hub cache.

Names and sizes of files are looked at, and the list of shards beside them; no weights, no configuration. So it is told
whether a model is complete, not whether it can be served. Only real paths below the directory count: a link out of it is
passed over, so that whoever may write there gives nothing else away.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path

from machd.gguf_parts import gguf_files, gguf_name, is_gguf
from machd.regular_files import read_regular
from machd.settings.texts import checked_model_name

MAX_MODELS = 1_000
_MAX_ENTRIES = 100_000
"""Entries of directories that are looked at, all together."""

_MAX_INDEX_BYTES = 1 << 26
_MAX_REF_BYTES = 256

_HUB_PREFIX = "models--"
_SUFFIX = ".safetensors"
_WEIGHTS = re.compile(r"model.*\.safetensors")
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_INDEX = "model.safetensors.index.json"
_PROJECTOR = "mmproj"
"""Part of the name of a GGUF file that holds the encoder of images or sound alone."""

_UNFINISHED = ".incomplete"
_DOWNLOADS = Path(".cache/huggingface/download")
"""Where the hub's tools keep what they are fetching into a directory."""


class ModelFilesKind(StrEnum):
    """A layout of files, the one first whose model keeps a name that two have."""

    DIRECTORY = "directory"
    GGUF = "gguf"
    HUB_SNAPSHOT = "hub_snapshot"
    HUB_GGUF = "hub_gguf"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model that is complete on disk.

    Attributes:
        name: What it is served as; no other model of the directory has it.
        path: As ``model.path`` takes it: a directory in mlx-lm layout, or a GGUF file, the first of several parts.
        size_bytes: Of all its files.
        modified_unix_s: When the last of its files was written.
    """

    name: str
    path: Path
    kind: ModelFilesKind
    size_bytes: int
    modified_unix_s: float


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model, weights and all else.

    Attributes:
        size_bytes: Of all of them.
        modified_unix_s: When the last of them was written.
    """

    size_bytes: int
    modified_unix_s: float


def files_at(path: Path) -> ModelFiles | None:
    """Look at a model's file, its parts, or the files in its directory; None where none can be looked at."""
    try:
        place = path.expanduser()
        is_directory = place.is_dir()
        paths = list(islice(place.iterdir(), _MAX_ENTRIES)) if is_directory else gguf_files(place)
        statuses = [one.stat() for one in paths]
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    files = [one for one in statuses if stat.S_ISREG(one.st_mode)]
    if not files:
        return None
    return ModelFiles(sum(one.st_size for one in files), max(one.st_mtime for one in files))


def discover(directory: Path) -> list[FoundModel]:
    """List the complete models of a directory by name, at most :data:`MAX_MODELS`.

    ``NAME/``, ``NAME.gguf`` and all parts of ``NAME-00001-of-00003.gguf`` are NAME, one level deeper they are ``ORG/NAME``, and so is
    ``models--ORG--NAME/`` of a hub cache. A GGUF file of a hub cache is ORG/NAME where it is the only model of its repository, and
    ORG/NAME/FILE beside others; ``mmproj`` files are parts of models. Of two with one name a directory keeps it, and a GGUF file
    is named with its suffix; what lies in a hub cache is left out. Hidden files, and names that no request can ask for, are passed over.

    Raises:
        OSError: The directory cannot be read. What cannot be read below it is passed over.
    """
    walk = _Walk(directory)
    ranks = {kind: rank for rank, kind in enumerate(ModelFilesKind)}
    models = islice(walk.models(), MAX_MODELS)
    found: dict[str, FoundModel] = {}
    for model in sorted(models, key=lambda one: ranks[one.kind]):
        if model.name not in found:
            found[model.name] = model
        elif model.kind is ModelFilesKind.GGUF:
            name = f"{model.name}{model.path.suffix}"
            found.setdefault(name, replace(model, name=name))
    return [found[name] for name in sorted(found)]


class _Walk:
    """One look at a directory, with its bounds: how many entries, and how far links lead."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._root = directory.resolve(strict=True)
        self._entries_left = _MAX_ENTRIES

    def models(self) -> Iterator[FoundModel]:
        """Yield what is complete, perhaps several of one name.

        Raises:
            OSError: The directory cannot be read.
        """
        for name in self._names(self._directory):
            path = self._directory / name
            is_hub = name.startswith(_HUB_PREFIX)
            if is_hub:
                yield from self._hub_models(path)
                continue
            model = self._model(path, name)
            if model is not None:
                yield model
            elif self._status(path / "config.json") is None:
                for inner in self._names_inside(path):
                    model = self._model(path / inner, f"{name}/{inner}")
                    if model is not None:
                        yield model

    def _model(self, path: Path, name: str) -> FoundModel | None:
        """The model of one entry, or None where it is none, or not complete."""
        status = self._status(path)
        if status is None:
            return None
        if stat.S_ISDIR(status.st_mode):
            return self._checkpoint(path, name, ModelFilesKind.DIRECTORY)
        if not stat.S_ISREG(status.st_mode) or not is_gguf(path.name):
            return None
        part = gguf_name(path)
        if part.number > 1:
            return None
        statuses = [status] if part.count == 1 else self._parts(path)
        model_name = f"{name.removesuffix(path.name)}{part.model}"
        return _named(model_name, path, ModelFilesKind.GGUF, statuses) if statuses else None

    def _parts(self, first: Path) -> list[os.stat_result]:
        """Look at every part of a split GGUF model; none where one is missing."""
        part, statuses = gguf_name(first), list[os.stat_result]()
        for number in range(1, part.count + 1):
            status = self._status(first.with_name(part.part(number)))
            if status is None or not stat.S_ISREG(status.st_mode) or not status.st_size:
                return []
            statuses.append(status)
        return statuses

    def _hub_models(self, path: Path) -> list[FoundModel]:
        """The models of the snapshot that ``main`` names, or else the newest that is complete.

        A part of a file tells not whose it is: of another revision, or of a file that was given up. It speaks against
        all but the one that ``main`` names, which counts where each of its links leads to a file.
        """
        snapshots = path / "snapshots"
        revisions = {
            name: status.st_mtime
            for name in self._names_inside(snapshots)
            if (status := self._status(snapshots / name)) is not None
        }
        main = self._main_revision(path)
        if self._is_being_fetched(path / "blobs"):
            revisions = {
                one: modified_unix_s
                for one, modified_unix_s in revisions.items()
                if one == main and self._has_all(snapshots / one)
            }
        name = path.name.removeprefix(_HUB_PREFIX).replace("--", "/", 1)
        for revision in sorted(revisions, key=lambda one: (one != main, -revisions[one], one)):
            models = self._snapshot_models(snapshots / revision, name)
            if models:
                return models
        return []

    def _snapshot_models(self, snapshot: Path, name: str) -> list[FoundModel]:
        """The checkpoint and the GGUF files of a snapshot; converters put those of one model into a directory, too."""
        checkpoint = self._checkpoint(snapshot, name, ModelFilesKind.HUB_SNAPSHOT)
        files = [snapshot / inner for inner in self._names_inside(snapshot)]
        files += [file / inner for file in files for inner in self._names_inside(file)]
        ggufs = [
            replace(model, kind=ModelFilesKind.HUB_GGUF)
            for file in files
            if is_gguf(file.name) and _PROJECTOR not in file.name.lower()
            if (model := self._model(file, f"{name}/{file.name}")) is not None
        ]
        if checkpoint is not None:
            return [checkpoint, *ggufs]
        return [replace(ggufs[0], name=name)] if len(ggufs) == 1 else ggufs

    def _main_revision(self, path: Path) -> str | None:
        ref = path / "refs" / "main"
        if self._status(ref) is None:
            return None
        try:
            return read_regular(ref, max_bytes=_MAX_REF_BYTES).content.decode().strip()
        except (OSError, ValueError):
            return None

    def _checkpoint(self, path: Path, name: str, kind: ModelFilesKind) -> FoundModel | None:
        """The checkpoint in a directory, or None where weights are missing or still being fetched."""
        if self._is_being_fetched(path) or self._is_being_fetched(path / _DOWNLOADS):
            return None
        statuses = {one: self._status(path / one) for one in self._names_inside(path)}
        files = {
            one: status
            for one, status in statuses.items()
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_size
        }
        weights = {one for one in files if _WEIGHTS.fullmatch(one)}
        if "config.json" not in files or not weights:
            return None
        shards = _named_shards(path, files)
        if shards is None or not shards <= weights:
            return None
        return _named(name, path, kind, list(files.values()))

    def _is_being_fetched(self, directory: Path) -> bool:
        names = self._names_inside(directory, hidden=True)
        return any(name.endswith(_UNFINISHED) for name in names)

    def _has_all(self, directory: Path) -> bool:
        return all(self._status(directory / one) for one in self._names_inside(directory))

    def _names_inside(self, directory: Path, *, hidden: bool = False) -> list[str]:
        """The names in a directory below the root; none where it cannot be read."""
        status = self._status(directory)
        if status is None or not stat.S_ISDIR(status.st_mode):
            return []
        try:
            return self._names(directory, hidden=hidden)
        except OSError:
            return []

    def _names(self, directory: Path, *, hidden: bool = False) -> list[str]:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in islice(entries, self._entries_left)]
        self._entries_left -= len(names)
        return sorted(name for name in names if hidden or not name.startswith("."))

    def _status(self, path: Path) -> os.stat_result | None:
        """Look at a file where its links lead; None where that is not below the root, or nothing."""
        try:
            real = path.resolve(strict=True)
            return real.stat() if real.is_relative_to(self._root) else None
        except (OSError, RuntimeError):  # RuntimeError: a loop of links
            return None


def _named_shards(path: Path, files: Collection[str]) -> set[str] | None:
    """The files of weights that the index names; None where it cannot be read, or a shard of a count is missing."""
    # A name alone may count to 99,999: numbers that are there are counted, none that should be is written out.
    numbers: dict[tuple[str, int], set[int]] = {}
    for file in files:
        numbered = _SHARD.fullmatch(file.removesuffix(_SUFFIX))
        if numbered and _WEIGHTS.fullmatch(file):
            number, count = int(numbered["number"]), int(numbered["count"])
            seen = numbers.setdefault((numbered["stem"], count), set())
            if 1 <= number <= count:
                seen.add(number)
    if any(len(seen) < count for (_, count), seen in numbers.items()):
        return None
    if _INDEX not in files:
        return set()
    try:
        index = json.loads(read_regular(path / _INDEX, max_bytes=_MAX_INDEX_BYTES).content)
        return {str(file) for file in index["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _named(
    name: str, path: Path, kind: ModelFilesKind, files: Sequence[os.stat_result]
) -> FoundModel | None:
    try:
        checked_model_name(name)
    except ValueError:
        return None
    size_bytes = sum(file.st_size for file in files)
    if not size_bytes:
        return None
    return FoundModel(name, path, kind, size_bytes, max(file.st_mtime for file in files))
