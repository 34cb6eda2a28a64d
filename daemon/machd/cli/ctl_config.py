"""``machd ctl config``: the settings of a running daemon, read and changed until its next reload."""

from __future__ import annotations

import json
import tomllib

import click

from machd.api.admin_config import AdminConfig, ConfigChange
from machd.cli.ctl_target import admin_client, target_options
from machd.cli.ctl_text import say, say_json

__all__ = ["config"]


@click.group()
def config() -> None:
    """Read the running daemon's settings and change them until its next reload."""


@config.command()
@click.argument("key", required=False)
@target_options
def get(key: str | None) -> None:
    """Print KEY's value, or all settings with their origins, as JSON."""
    shown = admin_client().ask("GET", "/admin/config", AdminConfig)
    if key is None:
        say_json(shown)
        return
    section, name = _parts(key)
    try:
        value = shown.settings[section][name]
    except KeyError:
        raise click.UsageError("There is no such setting.") from None
    say(json.dumps(value))


@config.command(name="set")
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


def _patch(changes: dict[str, dict[str, object]]) -> None:
    change = admin_client().ask("PATCH", "/admin/config", ConfigChange, changes)
    say(f"changed {', '.join(change.changed)}" if change.changed else "nothing has changed")


def _parts(key: str) -> tuple[str, str]:
    section, dot, name = key.partition(".")
    if not dot or not name:
        raise click.UsageError("Write a key as SECTION.NAME.")
    return section, name


def _value(text: str) -> object:
    """A value as TOML has it, or else the text itself."""
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str | list) else text
