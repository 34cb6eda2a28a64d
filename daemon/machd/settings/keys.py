"""The table of settings: what each key is called, in every spelling, and what it takes.

Read off the classes in ``model``, so that flags, variables, files and pages cannot disagree. A
rule gives the spellings: section ``a``, key ``b`` is ``[a] b``, ``LME_A_B`` and ``--a-b``; the
further ones stand in :data:`ALIASES`. A model's table (``[models.NAME]``) has keys of its own
(:func:`table_keys`), and so has an adapter's; a file and the admin API alone can set them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic.fields import FieldInfo

from machd.settings.adapters import AdapterTable
from machd.settings.model import Settings
from machd.settings.models import TABLE_SECTIONS, ModelTable
from machd.settings.section import Mark, SettingsSection
from machd.settings.texts import checked_adapter_name, checked_model_name

ENVIRONMENT_PREFIX = "LME_"
MODELS_SECTION = "models"
"""The section that holds models' tables beside its keys."""

ADAPTERS_SECTION = "adapters"
"""The section that holds adapters' tables beside its keys."""


@dataclass(frozen=True, slots=True)
class TableKind:
    """What the tables of a section are of.

    Attributes:
        noun: One such thing, in messages.
        fields: The keys that a table has of its own.
        sections: Sections whose keys a table may have, too.
        check_name: Raises ValueError for what can be no table's name; see :mod:`machd.settings.texts`.
    """

    noun: str
    fields: type[SettingsSection]
    check_name: Callable[[str], str]
    sections: tuple[str, ...] = ()


TABLE_KINDS: Mapping[str, TableKind] = MappingProxyType(
    {
        MODELS_SECTION: TableKind("a model", ModelTable, checked_model_name, TABLE_SECTIONS),
        ADAPTERS_SECTION: TableKind("an adapter", AdapterTable, checked_adapter_name),
    }
)
"""By the section that holds the tables beside its keys."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Further spellings of a key, besides those that its section and name give it.

    Attributes:
        word: The value that the flag stands for; None for a flag that is followed by its value.
        earlier: The dotted name that the key had before, which files and the admin API may go on to use.
    """

    dotted: str
    environment: str | None = None
    flag: str | None = None
    word: str | None = None
    earlier: str | None = None


ALIASES = (
    Alias("server.host", flag="--host"),
    Alias("server.port", flag="--port"),
    Alias(
        "continuous_batching.enabled",
        environment="LME_CONTINUOUS_BATCHING",
        flag="--continuous-batching",
    ),
    # The mode that it switches on goes by this word everywhere else.
    Alias("continuous_batching.enabled", environment="LME_BATCHED", flag="--batched"),
    Alias("engine.blas", environment="LME_BLAS", flag="--blas"),
    # Two keys had this name, and engine's is about steps.
    Alias(
        "limits.client_stall_timeout_s",
        environment="LME_LIMITS_STALL_TIMEOUT_S",
        flag="--limits-stall-timeout-s",
        earlier="limits.stall_timeout_s",
    ),
    Alias("experts.resident_gb", flag="--streaming", word="auto"),
    Alias("streaming.interval", environment="LME_STREAM_INTERVAL", flag="--stream-interval"),
)


class ValueKind(StrEnum):
    """Types of values."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    NUMBER = "number"
    TEXT = "text"
    LIST = "list"
    """Of texts; separated by commas in a variable or a flag."""


_KINDS = MappingProxyType({"string": "text", "array": "list"})
"""Kinds that JSON schema calls otherwise."""


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One setting.

    Attributes:
        environment_names: Variables that set it, the regular one first.
        flag_names: Options that set it, the regular one first; without the ``--no-`` forms.
        flag_words: Options that stand for one value each, with that value.
        earlier_names: Dotted names that the key had before.
        choices: The words it takes, or a list of it; empty when it takes more than words.
        words: The words that it takes besides numbers, such as ``auto``.
        least: The smallest number it takes; None without such a bound.
        most: The largest number it takes; None without such a bound.
        example: A value to show where the default has none to show.
        is_optional: None is a value: "not set".
        is_secret: The value is never shown.
        is_live: A running daemon takes on another value; otherwise it needs a restart.
        table: The model or adapter whose table has the key; None for a key of all of machd. ``section`` is
            empty for a key that only tables have.
        tables: The section that holds the table.
    """

    section: str
    name: str
    environment_names: tuple[str, ...]
    flag_names: tuple[str, ...]
    kind: ValueKind
    default: object
    description: str
    flag_words: tuple[tuple[str, str], ...] = ()
    earlier_names: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    example: object = None
    is_optional: bool = False
    is_secret: bool = False
    is_live: bool = True
    table: str | None = None
    tables: str = MODELS_SECTION

    @property
    def dotted(self) -> str:
        """The key as messages name it, such as ``server.port`` or ``models.coder.cache.prefix``."""
        table = () if self.table is None else (dotted_table(self.table, self.tables),)
        return ".".join(part for part in (*table, self.section, self.name) if part)

    @property
    def is_bool(self) -> bool:
        """True if its flag is a pair: ``--x`` and ``--no-x``."""
        return self.kind is ValueKind.BOOLEAN

    @property
    def is_list(self) -> bool:
        """True if it takes several texts."""
        return self.kind is ValueKind.LIST

    @property
    def range_text(self) -> str:
        """The bounds in words, such as ``1 to 1000`` or ``auto, or 1 to 9``; empty without bounds."""
        bounds = _bounds_text(self.least, self.most)
        return f"{', '.join(self.words)}, or {bounds}" if self.words else bounds

    def value_in(self, settings: Settings) -> object:
        """The key's value. Secret ones come in the clear: ask ``is_secret`` before showing.

        Of a model's table it is what the table says; None for what it leaves to its section.
        """
        if self.table is None:
            return getattr(getattr(settings, self.section), self.name)
        if not self.section:
            return getattr(tables_in(settings, self.tables)[self.table], self.name)
        table = settings.models.tables[self.table]
        return table.overrides.get(self.section, {}).get(self.name)


@dataclass(frozen=True, slots=True)
class SettingSection:
    """A section with its keys, in the order of the class."""

    name: str
    description: str
    keys: tuple[SettingKey, ...]


@cache
def setting_sections(model: type[Settings] = Settings) -> tuple[SettingSection, ...]:
    """Every section of ``model``, in the order of the class."""
    sections: list[SettingSection] = []
    for name, field in model.model_fields.items():
        section = field.annotation
        assert isinstance(section, type), f"{name} is not a section"
        assert issubclass(section, SettingsSection), f"{name} is not a section"
        sections.append(SettingSection(name, section.__doc__ or "", _keys(name, section)))
    return tuple(sections)


def setting_keys(model: type[Settings] = Settings) -> tuple[SettingKey, ...]:
    """Every key of ``model``, section by section."""
    return tuple(key for section in setting_sections(model) for key in section.keys)


def tables_in(settings: Settings, tables: str) -> Mapping[str, SettingsSection]:
    """The tables of a section, by name."""
    return settings.models.tables if tables == MODELS_SECTION else settings.adapters.tables


@cache
def table_keys(
    model: type[Settings] = Settings, tables: str = MODELS_SECTION
) -> tuple[SettingKey, ...]:
    """Every key that a model's or an adapter's table may have: its own, then those of sections; of no name yet."""
    kind = TABLE_KINDS[tables]
    own = _keys("", kind.fields)
    of_sections = tuple(
        key
        for key in setting_keys(model)
        # A table has a path of its own.
        if key.section in kind.sections and key.dotted != "model.path"
    )
    return tuple(
        replace(
            key, environment_names=(), flag_names=(), flag_words=(), is_live=True, tables=tables
        )
        for key in (*own, *of_sections)
    )


def keys_in_table(
    name: str, model: type[Settings] = Settings, tables: str = MODELS_SECTION
) -> tuple[SettingKey, ...]:
    """Every key that the table of one model or adapter may have."""
    return tuple(replace(key, table=name) for key in table_keys(model, tables))


def given_in_table(
    name: str, settings: Settings, tables: str = MODELS_SECTION
) -> tuple[SettingKey, ...]:
    """The keys of one table: its own, and those of sections that it overrides."""
    is_model = tables == MODELS_SECTION
    overrides = settings.models.tables[name].overrides if is_model else {}
    return tuple(
        key
        for key in keys_in_table(name, type(settings), tables)
        if not key.section or key.name in overrides.get(key.section, {})
    )


def toml_key(name: str) -> str:
    """A name as a part of a dotted key: in quotes where TOML wants them."""
    is_bare = re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None
    # TOML's basic strings have the escapes of JSON's.
    return name if is_bare else json.dumps(name, ensure_ascii=False)


def dotted_table(name: str, tables: str = MODELS_SECTION) -> str:
    """A table as messages name it, such as ``models.coder`` or ``models."qwen3:8b"``."""
    return f"{tables}.{toml_key(name)}"


def variable_of(dotted: str) -> str:
    """The regular variable of a key of all of machd."""
    return f"{ENVIRONMENT_PREFIX}{dotted.replace('.', '_')}".upper()


def changed_keys(old: Settings, new: Settings) -> tuple[SettingKey, ...]:
    """List the keys of all of machd whose values differ, in the order of the table."""
    return tuple(key for key in setting_keys(type(new)) if key.value_in(old) != key.value_in(new))


def changed_names(old: Settings, new: Settings) -> tuple[str, ...]:
    """List what differs, dotted: keys of all of machd, keys of tables, and tables that came or went."""
    names = [key.dotted for key in changed_keys(old, new)]
    for tables in TABLE_KINDS:
        before, after = tables_in(old, tables), tables_in(new, tables)
        for name in dict.fromkeys((*before, *after)):
            if name not in before or name not in after:
                names.append(dotted_table(name, tables))
            elif before[name] != after[name]:
                keys = keys_in_table(name, type(new), tables)
                names += [key.dotted for key in keys if key.value_in(old) != key.value_in(new)]
    return tuple(names)


def _keys(section: str, fields: type[SettingsSection]) -> tuple[SettingKey, ...]:
    schemas = fields.model_json_schema()["properties"]
    return tuple(
        _key(section, name, info, schemas[name])
        for name, info in fields.model_fields.items()
        if Mark.TABLES not in info.metadata
    )


def _key(section: str, name: str, field: FieldInfo, schema: Mapping[str, Any]) -> SettingKey:
    """Describe a field by its JSON schema, which is that of one type, perhaps beside words or null."""
    aliases = [alias for alias in ALIASES if alias.dotted == f"{section}.{name}"]
    forms: list[Mapping[str, Any]] = schema.get("anyOf", [schema])
    plain = [one for one in forms if "const" not in one and one.get("type") != "null"]
    assert len(plain) == 1, f"a setting has one type, and perhaps words or None: {schema}"
    (form,) = plain
    is_secret = Mark.SECRET in field.metadata or form.get("format") == "password"
    assert field.default is None or not is_secret, "a secret with a default is none"
    return SettingKey(
        section=section,
        name=name,
        environment_names=(
            variable_of(f"{section}.{name}"),
            *(alias.environment for alias in aliases if alias.environment),
        ),
        flag_names=(
            f"--{section}-{name}".replace("_", "-"),
            *(alias.flag for alias in aliases if alias.flag and alias.word is None),
        ),
        flag_words=tuple((one.flag, one.word) for one in aliases if one.flag and one.word),
        earlier_names=tuple(one.earlier for one in aliases if one.earlier),
        kind=ValueKind(_KINDS.get(form["type"], form["type"])),
        default=field.default,
        description=field.description or "",
        choices=tuple(form.get("items", form).get("enum", ())),
        words=tuple(one["const"] for one in forms if "const" in one),
        least=form.get("minimum"),
        most=form.get("maximum"),
        example=_example(field),
        is_optional=len(forms) > len(plain) and {"type": "null"} in forms,
        is_secret=is_secret,
        is_live=Mark.RESTART not in field.metadata,
    )


def _example(field: FieldInfo) -> object:
    """Return the first example; a tuple where TOML and JSON have a list."""
    example = next(iter(field.examples or ()), None)
    return tuple(example) if isinstance(example, list) else example


def _bounds_text(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f"{least:.15g} to {most:.15g}"
    if least is not None:
        return f"at least {least:.15g}"
    return "" if most is None else f"at most {most:.15g}"
