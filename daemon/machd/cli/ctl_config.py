"""``machd ctl config``: the settings of a running daemon, read and changed until its next reload."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import click

from machd.admin.config import AdminConfig, ConfigChange
from machd.cli.ctl_target import admin_client, target_options
from machd.cli.ctl_text import json_option, say, say_changed, say_json
from machd.settings.explain import settings_toml
from machd.settings.keys import setting_keys
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
    changes: dict[str, dict[str, object]] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise click.UsageError("Write each change as KEY=VALUE.")
        section, name = _parts(key.strip())
        changes.setdefault(section, {})[name] = _value(text.strip())
    _patch(changes)


@config.command()
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@target_options
def unset(keys: tuple[str, ...]) -> None:
    """Take changes back, so that the daemon's own sources count again."""
    changes: dict[str, dict[str, object]] = {}
    for key in keys:
        section, name = _parts(key)
        changes.setdefault(section, {})[name] = None
    _patch(changes)


def _value_of(key: str, shown: AdminConfig) -> object:
    values = {
        f"{section}.{name}": value
        for section, table in shown.settings.items()
        for name, value in table.items()
    }
    if key not in values:
        name = key.rpartition(".")[2]
        namesakes = [dotted for dotted in values if dotted.endswith(f".{name}")]
        near = nearest(key, namesakes or values)
        raise click.UsageError(f"There is no such setting; did you mean {near}?")
    return values[key]


def _loaded(shown: AdminConfig) -> LoadedSettings:
    """The daemon's settings as its own process has them, secrets masked and nothing checked again."""
    defaults = Settings()
    sections = {
        name: getattr(defaults, name).model_copy(update=shown.settings.get(name, {}))
        for name in Settings.model_fields
    }
    unsaid = {key.dotted: Origin(OriginKind.DEFAULT) for key in setting_keys(Settings)}
    return LoadedSettings(
        settings=defaults.model_copy(update=sections),
        origins=unsaid | shown.origins,
        config_file=None if shown.config_file is None else Path(shown.config_file),
    )


def _patch(changes: dict[str, dict[str, object]]) -> None:
    say_changed(admin_client().ask("PATCH", "/admin/config", ConfigChange, changes))


def _parts(key: str) -> tuple[str, str]:
    section, dot, name = key.partition(".")
    if not dot or not name:
        raise click.UsageError("Write a key as SECTION.NAME.")
    return section, name


def _value(text: str) -> object:
    """A value as TOML has it, or else the text itself."""
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, or an integer of too many digits
        return text
    return value if isinstance(value, bool | int | float | str | list) else text
