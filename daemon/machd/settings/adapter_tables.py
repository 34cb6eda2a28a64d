"""Rules between adapters' tables, and between their names and those of models.

Checked wherever sources are merged, because only then is it known which tables there are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from machd.settings.keys import ADAPTERS_SECTION, dotted_table
from machd.settings.model import Settings
from machd.settings.model_tables import MAX_TABLES, model_names
from machd.settings.models import name_essence


def adapter_table_problems(settings: Settings) -> list[str]:
    """A line for each rule that adapters' tables break, together or one by one."""
    count = len(settings.adapters.tables)
    if count > MAX_TABLES:
        return [f"{ADAPTERS_SECTION}: {count} tables are too many, the most is {MAX_TABLES}"]
    return [*_ambiguous_names(settings), *_missing_paths(settings), *_too_many_pinned(settings)]


def _ambiguous_names(settings: Settings) -> Iterator[str]:
    """Name what stands for two adapters, or for a model too."""
    owners = {name_essence(name): meant for name, meant in model_names(settings)}
    for name in settings.adapters.tables:
        dotted = dotted_table(name, ADAPTERS_SECTION)
        meant = owners.setdefault(name_essence(name), dotted)
        if meant != dotted:
            yield (
                f"{dotted}: {json.dumps(name, ensure_ascii=False)} stands for {meant} too; case, an "
                "organisation before a slash and :latest do not tell names apart"
            )


def _too_many_pinned(settings: Settings) -> Iterator[str]:
    """Say where pinned adapters of a model would leave no place for another."""
    section = settings.adapters
    for count in Counter(one.base for one in section.tables.values() if one.pin).values():
        if count >= section.max_loaded:
            yield (
                f"{ADAPTERS_SECTION}.max_loaded: {section.max_loaded} leaves no place beside {count} pinned "
                "adapters of one model; set it to more, or pin fewer"
            )


def _missing_paths(settings: Settings) -> Iterator[str]:
    for name, table in settings.adapters.tables.items():
        if table.path is None and settings.adapters.directory is None:
            yield (
                f"{dotted_table(name, ADAPTERS_SECTION)}: has no path; give path, or name the directory that "
                "holds it in adapters.directory"
            )
