"""Adapters that a daemon serves: those of its settings, and those of its directory.

Names are looked at, and whether files are there; what is in them is for :mod:`machd.served.adapter_readings`. Only real
paths below the directory count: a link out of it is passed over, so that whoever may write there gives nothing else away.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from machd.errors import SettingsError
from machd.gguf_parts import is_gguf
from machd.settings.adapters import AdaptersSettings
from machd.settings.keys import ADAPTERS_SECTION, dotted_table
from machd.settings.models import DEFAULT_NAME
from machd.settings.texts import checked_adapter_name

MAX_ADAPTERS = 1_000
_MAX_ENTRIES = 100_000
_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class AdapterToServe:
    """One adapter.

    Attributes:
        name: As requests name it, alone or behind its model's name and a colon.
        path: A directory, or a GGUF file.
        model_name: The model that it belongs to, by its name among those that are served.
        scale: What it counts for where a request says nothing else.
    """

    name: str
    path: Path
    model_name: str = DEFAULT_NAME
    scale: float = 1.0


def adapters_to_serve(
    section: AdaptersSettings, find_model: Callable[[str], str | None]
) -> tuple[AdapterToServe, ...]:
    """Return the adapters that settings name, and those of the directory; by name.

    Args:
        section: Of the settings.
        find_model: Finds a served model's name by one that a table has; None for that of no model.

    Raises:
        SettingsError: The directory cannot be read, a table's adapter is not in it, or no model is served as its base.
    """
    found = _found(section)
    problems: list[str] = []
    adapters: dict[str, AdapterToServe] = {}
    for name, table in section.tables.items():
        dotted = dotted_table(name, ADAPTERS_SECTION)
        path = found.get(name) if table.path is None else Path(table.path).expanduser()
        model_name = DEFAULT_NAME if table.base is None else find_model(table.base)
        if path is None:
            problems.append(
                f"{dotted}: adapters.directory holds no adapter of this name; give path"
            )
        elif model_name is None:
            problems.append(f"{dotted}.base: no model of this name is served")
        else:
            adapters[name] = AdapterToServe(name, path, model_name, table.scale)
    if problems:
        raise SettingsError(problems)
    for name, path in found.items():
        adapters.setdefault(name, AdapterToServe(name, path))
    return tuple(adapters[name] for name in sorted(adapters))


def find_adapter(section: AdaptersSettings, name: str) -> Path | None:
    """Return where the directory holds an adapter of a name, as it is now; None where it holds none."""
    if section.directory is None:
        return None
    directory = Path(section.directory).expanduser()
    try:
        return _found_in(directory).get(name)
    except OSError:
        return None


def _found(section: AdaptersSettings) -> Mapping[str, Path]:
    if section.directory is None:
        return {}
    directory = Path(section.directory).expanduser()
    try:
        return _found_in(directory)
    except OSError as error:
        problem = f"adapters.directory: {directory} cannot be read: {error.strerror}"
        raise SettingsError([problem]) from None


def _found_in(directory: Path) -> dict[str, Path]:
    """Look through a directory; returns adapters by name, at most :data:`MAX_ADAPTERS`.

    Of two with one name a directory keeps it, and a GGUF file is named with its suffix.

    Raises:
        OSError: The directory cannot be read.
    """
    root = directory.resolve(strict=True)
    with os.scandir(directory) as entries:
        names = sorted(one.name for one in islice(entries, _MAX_ENTRIES))
    found: dict[str, Path] = {}
    files: list[tuple[str, Path]] = []
    for path in islice(_adapters(directory, root, names), MAX_ADAPTERS):
        if path.is_dir():
            found[path.name] = path
        else:
            files.append((path.name[: -len(path.suffix)], path))
    for name, path in files:
        found.setdefault(path.name if name in found else name, path)
    return {name: path for name, path in found.items() if _is_name(name)}


def _adapters(directory: Path, root: Path, names: list[str]) -> Iterator[Path]:
    for name in names:
        path = directory / name
        if name.startswith("."):
            continue
        try:
            real = path.resolve(strict=True)
            if real.is_relative_to(root) and (
                (real / _CONFIG).is_file() if real.is_dir() else is_gguf(name) and real.is_file()
            ):
                yield path
        except (OSError, RuntimeError):  # RuntimeError: a loop of links
            continue


def _is_name(name: str) -> bool:
    try:
        checked_adapter_name(name)
    except ValueError:
        return False
    return True
