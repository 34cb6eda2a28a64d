"""``machd ctl config``: the settings of a running daemon, read and changed until its next reload."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from machd.admin.config import AdminConfig, ConfigChange
from machd.cli.ctl_target import admin_client, target_options
from machd.cli.ctl_text import json_option, say, say_changed, say_json
from machd.settings.explain import settings_toml, shown_settings
from machd.settings.keys import setting_keys, toml_key
from machd.settings.model import Settings
from machd.settings.problems import nearest
from machd.settings.sources import LoadedSettings, Origin, OriginKind


@click.group(short_help="Show and change the running daemon's settings.")
def config() -> None:
    """Read the running daemon's settings and change them until its next reload."""


@config.command(short_help="Print a setting's value, or all of them.")
@click.argument("key", required=False)
@target_options
@json_option
def get(key: str | None, *, as_json: bool) -> None:
    """Print KEY's value as JSON, or all settings with their origins as TOML."""
    shown = admin_client().ask("GET", "/admin/config", AdminConfig)
    if key is not None:
        say(json.dumps(_value_of(key, shown)))
    elif as_json:
        say_json(shown)
    else:
        for line in settings_toml(_loaded(shown), origins=True).splitlines():
            say(line)


@config.command(name="set", short_help="Change settings until the next reload.")
@click.argument("assignments", metavar="KEY=VALUE...", nargs=-1, required=True)
@target_options
def set_values(assignments: tuple[str, ...]) -> None:
    """Change settings; a VALUE is written as in the settings file, quotes may be left out."""
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise click.UsageError("Write each change as KEY=VALUE.")
        _put(changes, _parts(key.strip()), _value(text.strip()))
    _patch(changes)


@config.command()
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@target_options
def unset(keys: tuple[str, ...]) -> None:
    """Take changes back, so that the daemon's own sources count again."""
    changes: dict[str, Any] = {}
    for key in keys:
        _put(changes, _parts(key.strip()), None)
    _patch(changes)


def _value_of(key: str, shown: AdminConfig) -> object:
    values = dict(_values(shown.settings))
    parts = _split(key)
    for known in setting_keys(Settings):
        if key in known.earlier_names:
            parts = (known.section, known.name)
    if parts not in values:
        dotted = {".".join(map(toml_key, one)): one for one in values}
        namesakes = [known for known, one in dotted.items() if one[-1:] == parts[-1:]]
        near = nearest(key, namesakes or dotted)
        raise click.UsageError(f"There is no such setting; did you mean {near}?")
    return values[parts]


def _values(
    tables: Mapping[str, object], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield what can be asked for: each value, and each model's table whole."""
    for name, value in tables.items():
        if above:
            yield (*above, name), value
        if isinstance(value, dict):
            yield from _values(value, (*above, name))


def _loaded(shown: AdminConfig) -> LoadedSettings:
    """The daemon's settings as its own process has them, secrets masked and nothing checked again."""
    unsaid = {key.dotted: Origin(OriginKind.DEFAULT) for key in setting_keys(Settings)}
    return LoadedSettings(
        settings=shown_settings(shown.settings),
        origins=unsaid | shown.origins,
        config_file=None if shown.config_file is None else Path(shown.config_file),
    )


def _patch(changes: Mapping[str, object]) -> None:
    say_changed(admin_client().ask("PATCH", "/admin/config", ConfigChange, changes))


def _put(changes: dict[str, Any], parts: tuple[str, ...], value: object) -> None:
    *above, name = parts
    for part in above:
        below = changes.setdefault(part, {})
        if not isinstance(below, dict):
            raise click.UsageError(f"{part} is both a value and a table.")
        changes = below
    changes[name] = value


def _parts(key: str) -> tuple[str, ...]:
    parts = _split(key)
    if len(parts) > 1:
        return parts
    raise click.UsageError(
        "Write a key as SECTION.NAME, and a model's name with dots or colons in it in quotes."
    )


def _split(key: str) -> tuple[str, ...]:
    """The parts of a dotted key as TOML has it; none where it is no such key."""
    parts: list[str] = []
    try:
        table: object = tomllib.loads(f"{key} = 0")
        while isinstance(table, dict):
            ((part, table),) = table.items()
            parts.append(part)
    except (ValueError, RecursionError):  # not TOML, or not one key
        return ()
    return tuple(parts)


def _value(text: str) -> object:
    """A value as TOML has it, or else the text itself."""
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, or an integer of too many digits
        return text
    return value if isinstance(value, bool | int | float | str | list | dict) else text
