"""The table of settings: what each key is called, in every spelling, and what it takes.

Read off the classes in ``model``, so that flags, variables, files and pages cannot disagree. A
rule gives the spellings: section ``a``, key ``b`` is ``[a] b``, ``LME_A_B`` and ``--a-b``; the
further ones stand in :data:`ALIASES`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from machd.settings.model import Mark, Settings, SettingsSection

__all__ = [
    "ALIASES",
    "ENVIRONMENT_PREFIX",
    "Alias",
    "SettingKey",
    "SettingSection",
    "ValueKind",
    "setting_keys",
    "setting_sections",
]

ENVIRONMENT_PREFIX = "LME_"


@dataclass(frozen=True, slots=True)
class Alias:
    """Further spellings of a key, besides those that its section and name give it."""

    dotted: str
    environment: str | None = None
    flag: str | None = None


ALIASES = (
    Alias("server.host", flag="--host"),
    Alias("server.port", flag="--port"),
    Alias("engine.blas", environment="LME_BLAS", flag="--blas"),
    Alias("streaming.interval", environment="LME_STREAM_INTERVAL", flag="--stream-interval"),
)


class ValueKind(StrEnum):
    """What a key takes."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    NUMBER = "number"
    TEXT = "text"
    LIST = "list"
    """Of texts; separated by commas in a variable or a flag."""


@dataclass(frozen=True, slots=True)
class SettingKey:
    """One setting.

    Attributes:
        environment_names: Variables that set it, the regular one first.
        flag_names: Options that set it, the regular one first; without the ``--no-`` forms.
        choices: The words it takes; empty when it takes more than words.
        least: The smallest number it takes; None without such a bound.
        most: The largest number it takes; None without such a bound.
        example: A value to show where the default has none to show.
        is_optional: None is a value: "not set".
        is_secret: The value is never shown.
    """

    section: str
    name: str
    environment_names: tuple[str, ...]
    flag_names: tuple[str, ...]
    kind: ValueKind
    default: object
    description: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    example: object = None
    is_optional: bool = False
    is_secret: bool = False

    @property
    def dotted(self) -> str:
        """The key as messages name it, such as ``server.port``."""
        return f"{self.section}.{self.name}"

    @property
    def is_bool(self) -> bool:
        """Whether its flag is a pair: ``--x`` and ``--no-x``."""
        return self.kind is ValueKind.BOOLEAN

    @property
    def is_list(self) -> bool:
        """Whether it takes several texts."""
        return self.kind is ValueKind.LIST

    @property
    def type_text(self) -> str:
        """What the key takes, in words: ``integer``, ``auto|json|console``, ``text or unset``."""
        text = "|".join(self.choices) or self.kind.value
        return f"{text} or unset" if self.is_optional else text

    @property
    def range_text(self) -> str:
        """The bounds in words, such as ``1 to 1000``; empty without bounds."""
        if self.least is not None and self.most is not None:
            return f"{self.least:.15g} to {self.most:.15g}"
        if self.least is not None:
            return f"at least {self.least:.15g}"
        if self.most is not None:
            return f"at most {self.most:.15g}"
        return ""

    def value_in(self, settings: Settings) -> object:
        """The key's value. Secret ones come in the clear: ask ``is_secret`` before showing."""
        return getattr(getattr(settings, self.section), self.name)


@dataclass(frozen=True, slots=True)
class SettingSection:
    """A section with its keys, in the order of the class."""

    name: str
    description: str
    keys: tuple[SettingKey, ...]


def setting_sections(model: type[Settings] = Settings) -> tuple[SettingSection, ...]:
    """Every section of ``model``, in the order of the class."""
    sections: list[SettingSection] = []
    for name, field in model.model_fields.items():
        section = field.annotation
        assert isinstance(section, type), f"{name} is not a section"
        assert issubclass(section, SettingsSection), f"{name} is not a section"
        keys = tuple(_key(name, key, info) for key, info in section.model_fields.items())
        sections.append(SettingSection(name, section.__doc__ or "", keys))
    return tuple(sections)


def setting_keys(model: type[Settings] = Settings) -> tuple[SettingKey, ...]:
    """Every key of ``model``, section by section."""
    return tuple(key for section in setting_sections(model) for key in section.keys)


def _key(section: str, name: str, field: FieldInfo) -> SettingKey:
    aliases = [alias for alias in ALIASES if alias.dotted == f"{section}.{name}"]
    annotation, is_optional = _without_none(field.annotation)
    kind, choices = _kind(annotation)
    is_secret = Mark.SECRET in field.metadata or annotation is SecretStr
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
            *(alias.flag for alias in aliases if alias.flag),
        ),
        kind=kind,
        default=field.default,
        description=field.description or "",
        choices=choices,
        least=_least(field.metadata),
        most=_most(field.metadata),
        example=_example(field),
        is_optional=is_optional,
        is_secret=is_secret,
    )


def _example(field: FieldInfo) -> object:
    """The first example; a tuple where TOML and JSON have a list."""
    example = next(iter(field.examples or ()), None)
    return tuple(example) if isinstance(example, list) else example


def _without_none(annotation: object) -> tuple[object, bool]:
    """The one type that is not None, bare of ``Annotated``, and whether None is allowed."""
    is_union = get_origin(annotation) in {Union, UnionType}
    members = get_args(annotation) if is_union else (annotation,)
    types = [member for member in members if member is not NoneType]
    assert len(types) == 1, f"a setting has one type, and perhaps None: {annotation}"
    bare = get_args(types[0])[0] if get_origin(types[0]) is Annotated else types[0]
    return bare, len(types) < len(members)


def _kind(annotation: object) -> tuple[ValueKind, tuple[str, ...]]:
    """What a type takes, and its words if it is a ``Literal``."""
    if get_origin(annotation) is Literal:
        return ValueKind.TEXT, tuple(str(choice) for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return ValueKind.LIST, ()
    kinds: dict[object, ValueKind] = {
        bool: ValueKind.BOOLEAN,
        int: ValueKind.INTEGER,
        float: ValueKind.NUMBER,
        str: ValueKind.TEXT,
        SecretStr: ValueKind.TEXT,
    }
    assert annotation in kinds, f"a setting cannot be of the type {annotation}"
    return kinds[annotation], ()


def _least(metadata: Iterable[object]) -> float | None:
    """The ``ge`` bound, if there is one."""
    return next((_bound(mark.ge) for mark in metadata if isinstance(mark, Ge)), None)


def _most(metadata: Iterable[object]) -> float | None:
    """The ``le`` bound, if there is one."""
    return next((_bound(mark.le) for mark in metadata if isinstance(mark, Le)), None)


def _bound(limit: object) -> float:
    assert isinstance(limit, int | float), f"a bound is a number: {limit}"
    return float(limit)
