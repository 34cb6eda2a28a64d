"""Rules between models' tables, and between the keys that each of them comes to.

Checked wherever sources are merged, because only then is it known which tables there are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePath

from pydantic import ValidationError

from machd.gguf_parts import gguf_name, is_gguf
from machd.settings.keys import MODELS_SECTION, dotted_table
from machd.settings.model import Settings
from machd.settings.models import DEFAULT_NAME, name_essence
from machd.settings.texts import HUB_ID

MAX_TABLES = 256
_DEFAULT_MODEL = "the model of model.path"


def table_problems(settings: Settings) -> list[str]:
    """A line for each rule that tables break, together or one by one."""
    count = len(settings.models.tables)
    if count > MAX_TABLES:
        return [f"{MODELS_SECTION}: {count} tables are too many, the most is {MAX_TABLES}"]
    return [*_ambiguous_names(settings), *_broken_tables(settings)]


def model_names(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each name that the settings give a model, with what messages call that model."""
    yield from ((name, _DEFAULT_MODEL) for name in default_names(settings))
    for name, table in settings.models.tables.items():
        yield from ((known, dotted_table(name)) for known in (name, *table.aliases))


def default_names(settings: Settings) -> tuple[str, ...]:
    """Return the names that the settings give the default model, its file's or directory's own among them."""
    file = PurePath(settings.model.path or "")
    served = gguf_name(file).model if is_gguf(file.name) else file.name
    return (DEFAULT_NAME, *settings.models.aliases, *((served,) if served else ()))


def _ambiguous_names(settings: Settings) -> Iterator[str]:
    """Name what stands for two models. The table with the path of ``model.path`` may repeat its names."""
    path = settings.model.path
    owners: dict[str, str | None] = dict.fromkeys(map(name_essence, default_names(settings)))
    for name, table in settings.models.tables.items():
        is_default = settings.path_of_model(name) == path
        for field, known in (("", name), *((".aliases", alias) for alias in table.aliases)):
            essence = name_essence(known)
            owner = owners.get(essence, name)
            if owner == name or (owner is None and is_default):
                owners[essence] = name
                continue
            meant = _DEFAULT_MODEL if owner is None else dotted_table(owner)
            yield (
                f"{dotted_table(name)}{field}: {json.dumps(known, ensure_ascii=False)} stands for {meant} "
                "too; case, an organisation before a slash and :latest do not tell names apart"
            )


def _broken_tables(settings: Settings) -> Iterator[str]:
    for name, table in settings.models.tables.items():
        if table.path is None and (problem := _missing_path(name, settings)):
            yield f"{dotted_table(name)}: {problem}"
        try:
            settings.of_model(name)
        except ValidationError as error:
            # A rule's message begins with a key, of which the table has another value.
            for detail in error.errors():
                yield f"{dotted_table(name)}.{detail['msg'].removeprefix('Value error, ')}"


def _missing_path(name: str, settings: Settings) -> str | None:
    """Say what a table without a path needs; None where its name says which model it is."""
    section = settings.models
    is_hub_id = HUB_ID.fullmatch(name) is not None
    table = section.tables[name]
    is_offline = table.overrides.get("model", {}).get("offline", settings.model.offline)
    if section.directory is not None or (is_hub_id and (section.hub_cache or not is_offline)):
        return None
    fix = "give path, or name the directory that holds it in models.directory"
    return f"has no path; {fix}{', or set model.offline to false to fetch it' if is_hub_id else ''}"
