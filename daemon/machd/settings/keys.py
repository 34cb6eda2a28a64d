"""The table of settings: what each key is called, in every spelling, and what it takes.

Read off the classes in ``model``, so that flags, variables, files and pages cannot disagree. A
rule gives the spellings: section ``a``, key ``b`` is ``[a] b``, ``LME_A_B`` and ``--a-b``; the
further ones stand in :data:`ALIASES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic.fields import FieldInfo

from machd.settings.model import Settings
from machd.settings.section import Mark, SettingsSection

ENVIRONMENT_PREFIX = "LME_"


@dataclass(frozen=True, slots=True)
class Alias:
    """Further spellings of a key, besides those that its section and name give it.

    Attributes:
        word: The value that the flag stands for; None for a flag that is followed by its value.
    """

    dotted: str
    environment: str | None = None
    flag: str | None = None
    word: str | None = None


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
        choices: The words it takes; empty when it takes more than words.
        words: The words that it takes besides numbers, such as ``auto``.
        least: The smallest number it takes; None without such a bound.
        most: The largest number it takes; None without such a bound.
        example: A value to show where the default has none to show.
        is_optional: None is a value: "not set".
        is_secret: The value is never shown.
        is_live: A running daemon takes on another value; otherwise it needs a restart.
    """

    section: str
    name: str
    environment_names: tuple[str, ...]
    flag_names: tuple[str, ...]
    kind: ValueKind
    default: object
    description: str
    flag_words: tuple[tuple[str, str], ...] = ()
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    example: object = None
    is_optional: bool = False
    is_secret: bool = False
    is_live: bool = True

    @property
    def dotted(self) -> str:
        """The key as messages name it, such as ``server.port``."""
        return f"{self.section}.{self.name}"

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
        """The key's value. Secret ones come in the clear: ask ``is_secret`` before showing."""
        return getattr(getattr(settings, self.section), self.name)


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
        schemas = section.model_json_schema()["properties"]
        keys = tuple(
            _key(name, key, info, schemas[key]) for key, info in section.model_fields.items()
        )
        sections.append(SettingSection(name, section.__doc__ or "", keys))
    return tuple(sections)


def setting_keys(model: type[Settings] = Settings) -> tuple[SettingKey, ...]:
    """Every key of ``model``, section by section."""
    return tuple(key for section in setting_sections(model) for key in section.keys)


def changed_keys(old: Settings, new: Settings) -> tuple[SettingKey, ...]:
    """List the keys whose values differ, in the order of the table."""
    return tuple(key for key in setting_keys(type(new)) if key.value_in(old) != key.value_in(new))


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
            f"{ENVIRONMENT_PREFIX}{section}_{name}".upper(),
            *(alias.environment for alias in aliases if alias.environment),
        ),
        flag_names=(
            f"--{section}-{name}".replace("_", "-"),
            *(alias.flag for alias in aliases if alias.flag and alias.word is None),
        ),
        flag_words=tuple((one.flag, one.word) for one in aliases if one.flag and one.word),
        kind=ValueKind(_KINDS.get(form["type"], form["type"])),
        default=field.default,
        description=field.description or "",
        choices=tuple(form.get("enum", ())),
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
