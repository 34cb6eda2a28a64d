"""The cache of ``huggingface_hub`` on this machine, and the address of the hub."""

from __future__ import annotations

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from machd.errors import ModelDownloadError

_PREFIX = "models--"
_USER_INFORMATION = re.compile(r"(?<=://)[^/?#\s]*@")


@dataclass(frozen=True, slots=True)
class CachedRepository:
    """A model of the hub of which something is here.

    Attributes:
        directory: Of the repository in the cache.
        ggufs: Its complete GGUF files, in the snapshots.
        size_bytes: Of all that lies there.
        is_being_fetched: A part of a file is there.
    """

    model: str
    directory: Path
    ggufs: tuple[Path, ...]
    size_bytes: int
    is_being_fetched: bool


def hub_endpoint() -> str:
    """Return the address of the hub for a message: ``HF_ENDPOINT``, or the public one."""
    from huggingface_hub import constants  # noqa: PLC0415 - slow to import

    return without_passwords(str(constants.ENDPOINT))


def without_passwords(text: str) -> str:
    """Return a text with no user name and no password in its addresses."""
    return _USER_INFORMATION.sub("", text)


def hub_cache() -> Path:
    """Return the directory in which ``huggingface_hub`` keeps what it has fetched."""
    from huggingface_hub import constants  # noqa: PLC0415 - slow to import

    return Path(str(constants.HF_HUB_CACHE))


def repository_directory(cache: Path, model: str) -> Path:
    """Return the directory of a model in a hub cache."""
    return cache / f"{_PREFIX}{model.replace('/', '--')}"


@contextmanager
def download_lock(cache: Path, model: str) -> Iterator[bool]:
    """Try to keep other processes from fetching or removing a model; False where one does so now.

    Raises:
        ModelDownloadError: The cache cannot be written.
    """
    with open_lock(cache, model) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def list_repositories(cache: Path) -> list[CachedRepository]:
    """List the models of a hub cache by name, those that are here in part with them."""
    return [cached_repository(one) for one in sorted(cache.glob(f"{_PREFIX}*--*")) if one.is_dir()]


def cached_repository(directory: Path) -> CachedRepository:
    """Look at all that is here of a model of the hub."""
    # A download renames its files meanwhile; os.walk passes over a directory that has gone.
    paths = (Path(folder, name) for folder, _, names in os.walk(directory) for name in names)
    files = [
        (path, fact)
        for path in paths
        if (fact := _status(path)) is not None and stat.S_ISREG(fact.st_mode)
    ]
    ggufs = [path for path in directory.glob("snapshots/*/**/*.gguf") if path.is_file()]
    name = directory.name.removeprefix(_PREFIX).replace("--", "/", 1)
    return CachedRepository(
        model=name,
        directory=directory,
        ggufs=tuple(sorted(ggufs)),
        size_bytes=sum(fact.st_size for _, fact in files),
        is_being_fetched=any(path.name.endswith(".incomplete") for path, _ in files),
    )


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


@contextmanager
def open_lock(cache: Path, model: str) -> Iterator[IO[str]]:
    """Open the file that stands for a download of a model between processes, without locking it.

    Raises:
        ModelDownloadError: The cache cannot be written.
    """
    path = cache / ".locks" / repository_directory(cache, model).name / "machd.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ModelDownloadError(
            f"cannot write {path}: {error.strerror}; point HF_HUB_CACHE at a directory that this user can write to"
        ) from error
    with file:
        yield file
