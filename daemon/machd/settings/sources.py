"""Settings put together: a TOML file, ``LME_*`` variables and flags, in rising order.

While the daemon runs, what an operator changes over the admin API stands above all of them.

Every value is checked where it was given, even if a stronger source overrides it, and every
problem of every source is reported in one :class:`~machd.errors.SettingsError`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import cast

from pydantic import BaseModel, ValidationError

from machd.errors import SettingsError
from machd.settings.file import find_settings_file
from machd.settings.keys import SettingKey, setting_keys
from machd.settings.layers import (
    Given,
    Origin,
    OriginKind,
    given_by_environment,
    given_by_file,
    given_by_flags,
    given_by_operator,
)
from machd.settings.model import Settings
from machd.settings.problems import printable, value_problem

_TYPED = frozenset({OriginKind.FILE, OriginKind.ADMIN})
"""Origins that have types of their own: TOML, JSON. The others have text."""


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings with their history.

    Attributes:
        origins: Where each value came from, by dotted key; an entry for every key.
        config_file: The file that was read; None if there was none.
    """

    settings: Settings
    origins: Mapping[str, Origin]
    config_file: Path | None


@dataclass(frozen=True, slots=True)
class SettingsSources:
    """Where a process reads its settings; a reload reads the same places again.

    Attributes:
        config_path: The file that ``--config`` names; None to look in the usual places.
        environ: Variables; those that do not start with ``LME_`` are none of ours.
        flags: Values by dotted key, only for the flags that were given.
    """

    config_path: Path | None
    environ: Mapping[str, str]
    flags: Mapping[str, object]

    def load(self) -> LoadedSettings:
        """Read all of them.

        Raises:
            SettingsError: Something is wrong; there is a line for each problem of each source.
        """
        return load_settings(config_path=self.config_path, environ=self.environ, flags=self.flags)


def overlaid(base: LoadedSettings, overrides: Mapping[str, object]) -> LoadedSettings:
    """Settings with others above them, in tables like a file's; no source is read again.

    Raises:
        SettingsError: Something in ``overrides`` is wrong; there is a line for each problem.
    """
    model = type(base.settings)
    values = {section: dict(getattr(base.settings, section)) for section in model.model_fields}
    layers = _Layers(model, values, dict(base.origins))
    layers.lay(given_by_operator(overrides, layers.keys))
    return layers.loaded(base.config_file)


def name_problems(tables: Mapping[str, object], model: type[Settings] = Settings) -> list[str]:
    """A line for each section or key in tables like a file's that does not exist."""
    keys = {key.dotted: key for key in setting_keys(model)}
    given = given_by_operator(tables, keys)
    return [printable(one) for one in given if isinstance(one, str)]


def process_environ() -> dict[str, str]:
    """A copy of this process's environment. Everything else is handed one."""
    return dict(os.environ)  # noqa: TID251 - the one place that reads it


def load_settings(
    *,
    config_path: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    model: type[Settings] = Settings,
) -> LoadedSettings:
    """Read every source, check every value, and merge them: flags > environment > file > defaults.

    Args:
        config_path: The file that ``--config`` names; None to look in the usual places.
        environ: Variables; those that do not start with ``LME_`` are none of ours.
        flags: Values by dotted key, only for the flags that were given.
        model: The class to fill; tests bring their own.

    Raises:
        SettingsError: Something is wrong; there is a line for each problem of each source.
    """
    layers = _Layers(model, {}, {})
    file = find_settings_file(config_path, environ)
    layers.lay(given_by_file(file, layers.keys))
    layers.lay(given_by_environment(environ, layers.keys))
    layers.lay(given_by_flags(flags, layers.keys))
    return layers.loaded(None if file is None else file.path)


class _Layers:
    """Values laid one source above the other, each checked where it was given."""

    def __init__(
        self,
        model: type[Settings],
        values: dict[str, dict[str, object]],
        origins: dict[str, Origin],
    ) -> None:
        self.keys = {key.dotted: key for key in setting_keys(model)}
        self._model = model
        self._values = values
        self._origins = dict.fromkeys(self.keys, Origin(OriginKind.DEFAULT)) | origins
        self._problems: list[str] = []

    def lay(self, source: Iterator[Given | str]) -> None:
        """Lay what a source gives above what is there."""
        for given in source:
            if isinstance(given, str):
                self._problems.append(given)
                continue
            try:
                value = _checked(given, self._model)
            except ValidationError as error:
                self._problems.extend(_value_problems(given, error))
            else:
                self._values.setdefault(given.key.section, {})[given.key.name] = value
            self._origins[given.key.dotted] = given.origin

    def loaded(self, config_file: Path | None) -> LoadedSettings:
        """What it all comes to.

        Raises:
            SettingsError: Something was wrong.
        """
        if self._problems:
            raise SettingsError([printable(problem) for problem in self._problems])
        return LoadedSettings(
            settings=_assembled(self._model, self._values),
            origins=MappingProxyType(self._origins),
            config_file=config_file,
        )


def _checked(given: Given, model: type[Settings]) -> object:
    """The value in its right type; one of a file has to have it, text elsewhere is parsed."""
    key = given.key
    section = cast("type[BaseModel]", model.model_fields[key.section].annotation)
    is_toml = given.origin.kind in _TYPED
    value = _from_toml(key, given.value) if is_toml else _from_text(key, given.value)
    checked = section.model_validate({key.name: value}, strict=is_toml)
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


def _assembled(model: type[Settings], values: Mapping[str, Mapping[str, object]]) -> Settings:
    """The settings of checked values; what is left to go wrong lies between keys."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [detail["msg"].removeprefix("Value error, ") for detail in error.errors()]
        raise SettingsError(lines) from None
