"""Settings out of their sources: a TOML file, ``LME_*`` variables and flags, in rising order.

While the daemon runs, what an operator changes over the admin API stands above all of them.

pydantic-settings merges what the sources give. Every value is checked where it was given, even if a stronger
source overrides it, and every problem of every source is reported in one
:class:`~machd.errors.SettingsError`: see docs/decisions/operating.md, 0044.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import InitSettingsSource, PydanticBaseSettingsSource

from machd.errors import SettingsError
from machd.settings.adapter_tables import adapter_table_problems
from machd.settings.file import (
    CONFIG_VARIABLE,
    SettingsFile,
    find_settings_file,
    read_settings_file,
)
from machd.settings.keys import (
    ENVIRONMENT_PREFIX,
    TABLE_KINDS,
    SettingKey,
    dotted_table,
    keys_in_table,
    setting_keys,
    tables_in,
    toml_key,
    variable_of,
)
from machd.settings.model import Settings
from machd.settings.model_tables import table_problems
from machd.settings.problems import nearest, printable, shortened, value_problem

Keys = Mapping[str, SettingKey]
"""The settings table by dotted key."""


class OriginKind(StrEnum):
    """The sources, weakest first."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"
    ADMIN = "admin"


_TYPED = frozenset({OriginKind.FILE, OriginKind.ADMIN})
"""Origins that have types of their own: TOML, JSON. The others have text."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of one value.

    Attributes:
        detail: The file's path, the variable's name, the flag, or ``the admin API``; empty for a
            default.
    """

    kind: OriginKind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """A value that one source gives for one key, not yet checked.

    Attributes:
        earlier_name: The key's or variable's name, if another one has taken its place.
    """

    key: SettingKey
    value: object
    origin: Origin
    earlier_name: str = ""


@dataclass(frozen=True, slots=True)
class GivenTable:
    """A table of ``section`` that one source has, whether or not there is a key in it."""

    name: str
    section: str


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings with their history.

    Attributes:
        origins: Where each value came from, by dotted key; an entry for every key, and for each that a
            model's table gives.
        config_file: The file that was read; None if there was none.
        renamed: Names of keys and variables that were given although others have taken their place, with those.
    """

    settings: Settings
    origins: Mapping[str, Origin]
    config_file: Path | None
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SettingsSources:
    """The places a process reads its settings from; a reload reads the same places again.

    Attributes:
        config_path: The file that ``--config`` names; None to look in the usual places.
        environ: Variables; those that do not start with ``LME_`` are none of machd's.
        flags: Values by dotted key, only for the flags that were given.
    """

    config_path: Path | None
    environ: Mapping[str, str]
    flags: Mapping[str, object]

    def load(self) -> LoadedSettings:
        """Read all of them, as :func:`load_settings`."""
        return load_settings(config_path=self.config_path, environ=self.environ, flags=self.flags)


class GivenSource(PydanticBaseSettingsSource):
    """The values of one source, each checked by itself.

    Attributes:
        origins: Origin of each value, by dotted key.
        renamed: Names that were given although others have taken their place, with those.
        problems: A line for each value, name or file that is wrong.
    """

    def __init__(self, model: type[Settings], given: Iterable[Given | GivenTable | str]) -> None:
        """Check everything that the source gives."""
        super().__init__(model)
        self.origins: dict[str, Origin] = {}
        self.renamed: dict[str, str] = {}
        self.problems: list[str] = []
        self._values: dict[str, dict[str, Any]] = {}
        for one in given:
            match one:
                case str():
                    self.problems.append(one)
                case GivenTable():
                    self._table(one.name, one.section)
                case Given():
                    self._take(one)

    def _take(self, given: Given) -> None:
        key, origin = given.key, given.origin
        if key.dotted in self.origins and origin.kind in _TYPED:
            names = ", ".join((key.dotted, *key.earlier_names))
            self.problems.append(f"{names}: is one setting; keep one name ({origin.detail})")
        self.origins[key.dotted] = origin
        if given.earlier_name:
            is_variable = origin.kind is OriginKind.ENVIRONMENT
            self.renamed[given.earlier_name] = (
                key.environment_names[0] if is_variable else key.dotted
            )
        try:
            value = _checked(given, cast("type[Settings]", self.settings_cls))
        except ValidationError as error:
            self.problems += _value_problems(given, error)
            return
        if key.table is None:
            self._values.setdefault(key.section, {})[key.name] = value
        elif not key.section:
            self._table(key.table, key.tables)[key.name] = value
        else:
            overrides = self._table(key.table, key.tables).setdefault("overrides", {})
            overrides.setdefault(key.section, {})[key.name] = value

    def _table(self, name: str, section: str) -> dict[str, Any]:
        """A table, in the shape of its class."""
        tables: dict[str, dict[str, Any]]
        tables = self._values.setdefault(section, {}).setdefault("tables", {})
        return tables.setdefault(name, {})

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002 - the library's
        """Return a section's values."""
        return self._values.get(field_name), field_name, True

    def __call__(self) -> dict[str, Any]:
        """Return the values by section and key."""
        return dict(self._values)


def load_settings(
    *,
    config_path: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    model: type[Settings] = Settings,
) -> LoadedSettings:
    """Read every source, check every value, and merge them: flags > environment > file > defaults.

    Arguments are as of :class:`SettingsSources`; tests bring a ``model`` of their own.

    Raises:
        SettingsError: Something is wrong; there is a line for each problem of each source.
    """
    keys = _keys_of(model)
    file = find_settings_file(config_path, environ)
    given = (_by_flags(flags, keys), _by_environment(environ, keys), _by_file(file, model))
    sources = [GivenSource(model, one) for one in given]
    default = Origin(OriginKind.DEFAULT)
    return _merged(
        model, sources, (), dict.fromkeys(keys, default), None if file is None else file.path
    )


def overlaid(base: LoadedSettings, overrides: Mapping[str, object]) -> LoadedSettings:
    """Lay other values above settings, in tables like a file's; no source is read again.

    Raises:
        SettingsError: Something in ``overrides`` is wrong; there is a line for each problem.
    """
    model = type(base.settings)
    source = GivenSource(model, _by_operator(overrides, model))
    below = {section: dict(getattr(base.settings, section)) for section in model.model_fields}
    for section in TABLE_KINDS:
        tables = tables_in(base.settings, section)
        below[section]["tables"] = {name: table.model_dump() for name, table in tables.items()}
    return _merged(
        model, [source], (InitSettingsSource(model, below),), base.origins, base.config_file
    )


def _keys_of(model: type[Settings]) -> Keys:
    return {key.dotted: key for key in setting_keys(model)}


def _merged(
    model: type[Settings],
    sources: list[GivenSource],
    below: tuple[PydanticBaseSettingsSource, ...],
    origins: Mapping[str, Origin],
    config_file: Path | None,
) -> LoadedSettings:
    """Merge sources, the strongest first, above others that are known to be right.

    Raises:
        SettingsError: Something is wrong with a source, or between keys of several.
    """
    if problems := [problem for source in reversed(sources) for problem in source.problems]:
        raise SettingsError([printable(problem) for problem in problems])
    for source in reversed(sources):
        origins = {**origins, **source.origins}
    ready_made: dict[str, Any] = {"_build_sources": ((*sources, *below), {})}
    try:
        settings = model(**ready_made)  # a parameter that pydantic's mypy plugin does not know
    except ValidationError as error:
        lines = [detail["msg"].removeprefix("Value error, ") for detail in error.errors()]
        raise SettingsError(lines) from None
    if problems := [*table_problems(settings), *adapter_table_problems(settings)]:
        raise SettingsError([printable(problem) for problem in problems])
    renamed = {before: now for source in sources for before, now in source.renamed.items()}
    return LoadedSettings(
        settings, MappingProxyType(dict(origins)), config_file, MappingProxyType(renamed)
    )


def current_names(
    changes: Mapping[str, Mapping[str, object]], model: type[Settings] = Settings
) -> dict[str, dict[str, object]]:
    """Changes in tables like a file's, with the name that each key has now; one under both names keeps both."""
    renamed = {section: dict(values) for section, values in changes.items()}
    for key in setting_keys(model):
        for earlier in key.earlier_names:
            section, _, name = earlier.partition(".")
            values = renamed.get(section, {})
            if name in values and key.name not in values:
                values[key.name] = values.pop(name)
    return renamed


def name_problems(changes: Mapping[str, Mapping[str, object]], settings: Settings) -> list[str]:
    """A line for each section or key in changes of these settings that does not exist.

    Args:
        changes: Tables like a file's; None for what is taken away, a model's or an adapter's table among it.
        settings: Those with the tables that can be taken away.
    """
    model = type(settings)
    named = {section: dict(values) for section, values in changes.items()}
    problems: list[str] = []
    for section in TABLE_KINDS:
        values, tables = named.get(section, {}), tables_in(settings, section)
        own = {key.name for key in setting_keys(model) if key.section == section}
        for name, value in list(values.items()):
            if name in own or not _only_takes_away(value):
                continue
            if name not in tables:
                dotted = dotted_table(name, section)
                near = nearest(dotted, [dotted_table(one, section) for one in tables or own])
                problems.append(f"{shortened(dotted)}: no such setting; did you mean {near}?")
            if name not in tables or value is None:
                del values[name]
    problems += [one for one in _by_operator(named, model) if isinstance(one, str)]
    return [printable(problem) for problem in problems]


def _only_takes_away(value: object) -> bool:
    """Return True for a change of a table that gives it nothing."""
    if isinstance(value, Mapping):
        return bool(value) and all(_only_takes_away(one) for one in value.values())
    return value is None


def process_environ() -> dict[str, str]:
    """A copy of this process's environment. Everything else is handed one."""
    return dict(os.environ)  # noqa: TID251 - the one place that reads it


def _by_file(
    file: SettingsFile | None, model: type[Settings]
) -> Iterator[Given | GivenTable | str]:
    """Yield the values of the file's sections; an unreadable file is its problems."""
    if file is None:
        return
    try:
        tables = read_settings_file(file)
    except SettingsError as error:
        yield from error.problems
        return
    yield from _by_tables(tables, Origin(OriginKind.FILE, str(file.path)), model)


def _by_operator(
    tables: Mapping[str, object], model: type[Settings]
) -> Iterator[Given | GivenTable | str]:
    """Yield the values that an operator has changed while the daemon runs, in tables like a file's."""
    yield from _by_tables(tables, Origin(OriginKind.ADMIN, "the admin API"), model)


def _by_tables(
    tables: Mapping[str, object], origin: Origin, model: type[Settings]
) -> Iterator[Given | GivenTable | str]:
    keys = _keys_of(model)
    sections = {key.section for key in keys.values()}
    for section, table in tables.items():
        if section not in sections:
            near = _nearest_section(section, keys)
            shown = shortened(section)
            yield f"{shown}: no such section; did you mean {near}? ({origin.detail})"
        elif not isinstance(table, dict):
            yield f"{section}: is a section; write [{section}] ({origin.detail})"
        else:
            for name, value in table.items():
                is_table = section in TABLE_KINDS and isinstance(value, dict)
                if is_table and f"{section}.{name}" not in keys:
                    yield from _by_table(section, name, value, origin, model)
                else:
                    yield _given(f"{section}.{name}", value, origin, keys)


def _by_table(
    tables: str, name: str, table: Mapping[str, object], origin: Origin, model: type[Settings]
) -> Iterator[Given | GivenTable | str]:
    """Yield the values of one model's or adapter's table; a section in it may be None, which takes it away."""
    kind, dotted = TABLE_KINDS[tables], dotted_table(name, tables)
    try:
        kind.check_name(name)
    except ValueError as error:
        yield f"{shortened(dotted)}: the name {error} ({origin.detail})"
        return
    yield GivenTable(name, tables)
    keys = {key.dotted: key for key in keys_in_table(name, model, tables)}
    for inner, value in table.items():
        place = f"{dotted}.{toml_key(inner)}"
        if inner not in kind.sections and (place in keys or not isinstance(value, dict)):
            yield _given(place, value, origin, keys)
        elif inner not in kind.sections:
            sections = ", ".join(kind.sections) or "none"
            problem = f"no such section in {kind.noun}'s table; there are {sections}"
            yield f"{shortened(place)}: {problem} ({origin.detail})"
        elif isinstance(value, dict):
            for key, given in value.items():
                yield _given(f"{place}.{toml_key(key)}", given, origin, keys)
        elif value is not None:
            yield f"{place}: is a section; write [{place}] ({origin.detail})"


def _by_environment(environ: Mapping[str, str], keys: Keys) -> Iterator[Given | str]:
    """Yield the values of the ``LME_*`` variables; two spellings of one key have to agree."""
    key_of = {name: key for key in keys.values() for name in key.environment_names}
    ours = {name for name in environ if name.startswith(ENVIRONMENT_PREFIX)} - {CONFIG_VARIABLE}
    for name in sorted(ours - key_of.keys()):
        near = nearest(name, (*key_of, CONFIG_VARIABLE))
        yield f"{shortened(name)}: no such variable; did you mean {near}?"
    for key in keys.values():
        names = [name for name in key.environment_names if name in ours]
        if len({environ[name] for name in names}) > 1:
            yield f"{key.dotted}: given twice, and not the same; keep one ({', '.join(names)})"
        for name in names:
            origin = Origin(OriginKind.ENVIRONMENT, name)
            is_earlier = name in map(variable_of, key.earlier_names)
            yield Given(key, environ[name], origin, earlier_name=name if is_earlier else "")


def _by_flags(flags: Mapping[str, object], keys: Keys) -> Iterator[Given | str]:
    """Yield the values of the flags, by dotted key."""
    for dotted, value in flags.items():
        flag = keys[dotted].flag_names[0] if dotted in keys else "flag"
        yield _given(dotted, value, Origin(OriginKind.FLAG, flag), keys)


def _given(dotted: str, value: object, origin: Origin, keys: Keys) -> Given | str:
    """The value, or the problem that there is no such key."""
    if dotted in keys:
        return Given(keys[dotted], value, origin)
    for key in keys.values():
        if dotted in key.earlier_names:
            named = replace(origin, detail=f"{origin.detail}, as {dotted}")
            return Given(key, value, named, earlier_name=dotted)
    near = _nearest_key(dotted, keys)
    return f"{shortened(dotted)}: no such setting; did you mean {near}? ({origin.detail})"


def _nearest_key(dotted: str, keys: Keys) -> str:
    """The same name in another section, or else the most alike."""
    name = dotted.rpartition(".")[2]
    namesakes = [key.dotted for key in keys.values() if key.name == name]
    return nearest(dotted, namesakes or keys)


def _nearest_section(section: str, keys: Keys) -> str:
    """A key written outside its section, or else the section most alike."""
    namesakes = [key.dotted for key in keys.values() if key.name == section]
    return nearest(section, namesakes or [f"[{key.section}]" for key in keys.values()])


def _checked(given: Given, model: type[Settings]) -> object:
    """The value in its right type; one of a file has to have it, text elsewhere is parsed."""
    key = given.key
    own = TABLE_KINDS[key.tables].fields
    fields = model.model_fields[key.section].annotation if key.section else own
    is_toml = given.origin.kind in _TYPED
    value = _from_toml(key, given.value) if is_toml else _from_text(key, given.value)
    checked = cast("type[BaseModel]", fields).model_validate({key.name: value}, strict=is_toml)
    return cast("object", getattr(checked, key.name))


def _from_toml(key: SettingKey, value: object) -> object:
    """TOML has arrays, settings have tuples."""
    return tuple(value) if key.is_list and isinstance(value, list) else value


def _from_text(key: SettingKey, value: object) -> object:
    """Split a list at its commas, and take nothing for "not set"."""
    if not isinstance(value, str):
        return value
    if key.is_list:
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return None if key.is_optional and not value.strip() else value


def _value_problems(given: Given, error: ValidationError) -> Iterator[str]:
    is_toml = given.origin.kind in _TYPED
    details = error.errors(include_url=False)
    if given.key.words:
        # One complaint for each of the types it could have been; the number's says the most.
        details = details[:1]
    for detail in details:
        what = value_problem(given.key, detail, is_toml=is_toml)
        yield f"{given.key.dotted}: {what} ({given.origin.detail})"
