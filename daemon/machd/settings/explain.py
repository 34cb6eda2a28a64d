"""Settings made readable: in force, as an example file, as a schema, as a page.

All of it comes from the table in ``keys``. A secret value is masked wherever it would be shown.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import tomlkit

from machd.settings.adapters import AdapterTable
from machd.settings.keys import (
    ADAPTERS_SECTION,
    MODELS_SECTION,
    TABLE_KINDS,
    SettingKey,
    dotted_table,
    given_in_table,
    setting_keys,
    setting_sections,
    table_keys,
    tables_in,
)
from machd.settings.model import Settings
from machd.settings.models import TABLE_SECTIONS, ModelTable
from machd.settings.problems import printable
from machd.settings.sources import LoadedSettings, Origin, OriginKind

MASK = "********"
_EXAMPLE_NAMES = {MODELS_SECTION: "coder", ADAPTERS_SECTION: "support"}

_WIDTH_CHARS = 80
_INDENT = "#   "

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
    for header, keys in _shown_tables(loaded.settings):
        lines = [_assignment(key, loaded.settings) for key in keys]
        if origins:
            # A key of a model's table that nobody gave has no origin.
            unsaid = Origin(OriginKind.DEFAULT)
            notes = [_origin_text(loaded.origins.get(key.dotted, unsaid)) for key in keys]
            lines = _aligned(lines, notes)
        blocks.append("\n".join((f"[{header}]", *lines)))
    if origins:
        file = "none found" if loaded.config_file is None else printable(str(loaded.config_file))
        blocks.insert(0, f"# Settings file: {file}")
    return "\n\n".join(blocks) + "\n"


def settings_json(loaded: LoadedSettings, *, origins: bool = False) -> dict[str, object]:
    """The settings in force as plain data: ``config_file``, ``settings`` and perhaps ``origins``.

    Args:
        loaded: What to show.
        origins: Add where each value came from: ``kind`` and ``detail`` by dotted key.
    """
    settings: dict[str, dict[str, Any]] = {
        section.name: {key.name: _shown(key, loaded.settings) for key in section.keys}
        for section in setting_sections(type(loaded.settings))
    }
    for section in TABLE_KINDS:
        for name in tables_in(loaded.settings, section):
            table = settings[section].setdefault(name, {})
            for key in given_in_table(name, loaded.settings, section):
                place = table.setdefault(key.section, {}) if key.section else table
                place[key.name] = _shown(key, loaded.settings)
    shown: dict[str, object] = {
        "config_file": None if loaded.config_file is None else str(loaded.config_file),
        "settings": settings,
    }
    if origins:
        shown["origins"] = {
            dotted: {"kind": origin.kind.value, "detail": origin.detail}
            for dotted, origin in loaded.origins.items()
        }
    return shown


def shown_settings(shown: Mapping[str, Mapping[str, Any]]) -> Settings:
    """Return the settings that :func:`settings_json` showed, secrets masked and nothing checked again."""
    defaults = Settings()
    sections: dict[str, object] = {}
    for section in setting_sections():
        names = {key.name for key in section.keys}
        values = shown.get(section.name, {})
        update = {name: value for name, value in values.items() if name in names}
        if section.name in TABLE_KINDS:
            shown_table = _shown_table if section.name == MODELS_SECTION else _shown_adapter
            update["tables"] = {
                name: shown_table(table) for name, table in values.items() if name not in names
            }
        sections[section.name] = getattr(defaults, section.name).model_copy(update=update)
    return defaults.model_copy(update=sections)


def settings_example(model: type[Settings] = Settings) -> str:
    """A settings file that changes nothing: every key with its description, commented out."""
    blocks = [_EXAMPLE_HEAD.rstrip("\n")]
    for section in setting_sections(model):
        entries = "\n\n".join(_example_entry(key) for key in section.keys)
        blocks.append(f"# {section.description}\n[{section.name}]\n\n{entries}")
        if section.name in TABLE_KINDS:
            blocks.append(_example_table(section.name, model))
    return "\n\n".join(blocks) + "\n"


def settings_schema(model: type[Settings] = Settings) -> dict[str, object]:
    """The JSON schema of a settings file, as editors read it."""
    schema = model.model_json_schema()
    table = schema["$defs"][ModelTable.__name__]["properties"]
    sections = schema["properties"]
    del table["overrides"]
    table |= {name: sections[name] for name in TABLE_SECTIONS}
    models = schema["$defs"][sections[MODELS_SECTION]["$ref"].rpartition("/")[2]]
    adapters = schema["$defs"][sections[ADAPTERS_SECTION]["$ref"].rpartition("/")[2]]
    for section in (models, adapters):
        section["additionalProperties"] = section["properties"].pop("tables")[
            "additionalProperties"
        ]
    for key in setting_keys(model):
        for earlier in key.earlier_names:
            section, _, name = earlier.partition(".")
            properties = schema["$defs"][sections[section]["$ref"].rpartition("/")[2]]["properties"]
            properties[name] = properties[key.name] | {"deprecated": True}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return head | schema | {"title": "machd.toml"}


def value_text(value: object) -> str:
    """A value as TOML writes it; whole seconds without a point, and ``unset`` for None."""
    if value is None:
        return "unset"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()


def _shown_tables(settings: Settings) -> Iterator[tuple[str, list[SettingKey]]]:
    """Yield each table of the file by its header, those of models and adapters behind their section."""
    for section in setting_sections(type(settings)):
        yield section.name, list(section.keys)
        for name in tables_in(settings, section.name) if section.name in TABLE_KINDS else ():
            given = given_in_table(name, settings, section.name)
            header = dotted_table(name, section.name)
            for inner, keys in groupby(given, lambda key: key.section):
                yield f"{header}.{inner}" if inner else header, list(keys)


def _shown_table(shown: Mapping[str, Any]) -> ModelTable:
    own = {name: value for name, value in shown.items() if name not in TABLE_SECTIONS}
    overrides = {name: value for name, value in shown.items() if name in TABLE_SECTIONS}
    return ModelTable.model_construct(None, **own, overrides=overrides)


def _shown_adapter(shown: Mapping[str, Any]) -> AdapterTable:
    return AdapterTable.model_construct(None, **shown)


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
    comment = "\n".join(_comment(full_description(key), _WIDTH_CHARS))
    if key.default is not None:
        return f"{comment}\n# {key.name} = {value_text(key.default)}"
    return f"{comment}\n# {key.name} = {value_text(key.example)}  # an example; by default unset"


def _example_table(tables: str, model: type[Settings]) -> str:
    """A table with every key of its own, further in than lines that are defaults."""
    kind, header = TABLE_KINDS[tables], dotted_table(_EXAMPLE_NAMES[tables], tables)
    lines = [f"[{header}]"]
    for key in table_keys(model, tables):
        if not key.section:
            lines += ["", *_comment(full_description(key), _WIDTH_CHARS - len(_INDENT))]
            lines.append(
                f"{key.name} = {value_text(key.default if key.example is None else key.example)}"
            )
    if kind.sections:
        sections = ", ".join(kind.sections)
        note = f"Keys of {sections}, for this model alone."
        lines += ["", *_comment(note, _WIDTH_CHARS - len(_INDENT))]
        lines += [f"[{header}.cache]", "prefix = false"]
    noun = kind.noun.partition(" ")[2]
    head = f"A table for each {noun} with a name of its own. No variable and no flag sets what is in it."
    indented = (f"{_INDENT}{line}".rstrip() for line in lines)
    return "\n".join((*_comment(head, _WIDTH_CHARS), "#", *indented))


def _comment(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )


def full_description(key: SettingKey) -> str:
    """The description, what the key takes where that is a short list or a range, and its earlier names."""
    text = key.description
    if key.choices:
        which = "Any" if key.is_list else "One"
        text = f"{text} {which} of {', '.join(key.choices)}."
    elif key.range_text:
        text = f"{text} ({key.range_text})"
    earlier = " and ".join(key.earlier_names)
    return f"{text} Its earlier name, {earlier}, works too." if earlier else text
