"""Settings made readable: in force, as an example file, as a schema, as a page.

All of it comes from the table in ``keys``. A secret value is masked wherever it would be shown.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import cast

import tomlkit

from machd.settings.keys import SettingKey, setting_sections
from machd.settings.model import Settings
from machd.settings.problems import printable
from machd.settings.sources import LoadedSettings, Origin, OriginKind

MASK = "********"
_WIDTH_CHARS = 80

_EXAMPLE_HEAD = """\
# The settings of machd.
#
# Every key is optional, and every line "# key = value" shows the default: take
# the "# " away to change it. The key [section] name is also the variable
# LME_SECTION_NAME and the flag --section-name. Flags win over variables, and
# variables win over this file.
"""


def settings_toml(loaded: LoadedSettings, *, origins: bool = False) -> str:
    """The settings in force as TOML that can be used as a settings file.

    Keys that are not set are comments, because TOML has no word for that. So are masked secrets.

    With ``origins`` a comment behind every value says where it came from, and the first line which file was read.
    """
    blocks: list[str] = []
    for section in setting_sections(type(loaded.settings)):
        lines = [_assignment(key, loaded.settings) for key in section.keys]
        if origins:
            notes = [_origin_text(loaded.origins[key.dotted]) for key in section.keys]
            lines = _aligned(lines, notes)
        blocks.append("\n".join((f"[{section.name}]", *lines)))
    if origins:
        file = "none found" if loaded.config_file is None else printable(str(loaded.config_file))
        blocks.insert(0, f"# Settings file: {file}")
    return "\n\n".join(blocks) + "\n"


def settings_json(loaded: LoadedSettings, *, origins: bool = False) -> dict[str, object]:
    """The settings in force as plain data: ``config_file``, ``settings`` and perhaps ``origins``."""
    shown: dict[str, object] = {
        "config_file": None if loaded.config_file is None else str(loaded.config_file),
        "settings": {
            section.name: {key.name: _shown(key, loaded.settings) for key in section.keys}
            for section in setting_sections(type(loaded.settings))
        },
    }
    if origins:
        shown["origins"] = {
            dotted: {"kind": origin.kind.value, "detail": origin.detail}
            for dotted, origin in loaded.origins.items()
        }
    return shown


def settings_example(model: type[Settings] = Settings) -> str:
    """A settings file that changes nothing: every key with its description, commented out."""
    blocks = [_EXAMPLE_HEAD.rstrip("\n")]
    for section in setting_sections(model):
        entries = "\n\n".join(_example_entry(key) for key in section.keys)
        blocks.append(f"# {section.description}\n[{section.name}]\n\n{entries}")
    return "\n\n".join(blocks) + "\n"


def settings_schema(model: type[Settings] = Settings) -> dict[str, object]:
    """The JSON schema of a settings file, as editors read it."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return schema | model.model_json_schema() | {"title": "machd.toml"}


def value_text(value: object) -> str:
    """A value as TOML writes it; whole seconds without a point, and ``unset`` for None."""
    if value is None:
        return "unset"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()


def _shown(key: SettingKey, settings: Settings) -> object:
    """A key's value as plain data, masked if it is a secret that is set."""
    value = key.value_in(settings)
    if key.is_secret and value is not None:
        return MASK
    return list(cast("tuple[object, ...]", value)) if key.is_list else value


def _assignment(key: SettingKey, settings: Settings) -> str:
    value = _shown(key, settings)
    if value is None:
        return f"# {key.name} is unset"
    line = f"{key.name} = {value_text(value)}"
    return f"# {line}" if key.is_secret else line


def _origin_text(origin: Origin) -> str:
    if origin.kind is OriginKind.DEFAULT:
        return "default"
    return f"{origin.kind} {printable(origin.detail)}"


def _aligned(lines: Sequence[str], notes: Iterable[str]) -> list[str]:
    """Comments behind lines, in one column."""
    width = max(len(line) for line in lines)
    return [f"{line:<{width}}  # {note}" for line, note in zip(lines, notes, strict=True)]


def _example_entry(key: SettingKey) -> str:
    comment = textwrap.fill(
        full_description(key),
        _WIDTH_CHARS,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )
    if key.default is not None:
        return f"{comment}\n# {key.name} = {value_text(key.default)}"
    return f"{comment}\n# {key.name} = {value_text(key.example)}  # an example; by default unset"


def full_description(key: SettingKey) -> str:
    """The description, and what the key takes where that is a short list or a range."""
    if key.choices:
        return f"{key.description} One of {', '.join(key.choices)}."
    return f"{key.description} ({key.range_text})" if key.range_text else key.description
