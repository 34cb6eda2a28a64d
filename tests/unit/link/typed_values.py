"""Values of every type that crosses the link, drawn at random, and a comparison that misses no part of them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import EnumType
from functools import cache
from math import isnan
from pathlib import Path
from types import NoneType, UnionType
from typing import Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from msgspec import UNSET, Struct, UnsetType, structs
from unit.settings.setting_values import (
    as_tables_toml,
    as_variables,
    dotted_values,
    model_tables,
)

from machd import errors
from machd.engine.protocol.media import PlainArray
from machd.errors import (
    ContextLengthExceededError,
    MachdError,
    RestartRequiredError,
    SettingsError,
    UnavailableError,
)
from machd.request.constraint import Constraint
from machd.request.generation import Grammar
from machd.scheduler.subscriber import SequenceRequest
from machd.settings.model import Settings
from machd.settings.sources import load_settings, overlaid

_NO_FILE = Path("/dev/null")

ERROR_CLASSES: list[type[MachdError]] = [
    one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, MachdError)
]

_COUNTS = st.integers(0, 2**40)
_KEYS = st.integers(0, 2**64 - 1)


def errors_of(error_class: type[MachdError]) -> st.SearchStrategy[MachdError]:
    """Errors of one class with any message and attributes."""
    if issubclass(error_class, SettingsError):
        return st.builds(error_class, st.lists(st.text()))
    if issubclass(error_class, RestartRequiredError):
        return st.builds(error_class, st.lists(st.text()).map(tuple))
    if issubclass(error_class, ContextLengthExceededError):
        return st.builds(
            error_class,
            context_tokens=_COUNTS,
            prompt_tokens=_COUNTS,
            asked_tokens=st.none() | _COUNTS,
            param=st.text(),
        )
    if issubclass(error_class, UnavailableError):
        return st.builds(error_class, st.text(), retry_after_s=_COUNTS)
    return st.builds(error_class, st.text(), param=st.none() | st.text())


def _settings() -> st.SearchStrategy[Settings]:
    return st.builds(_with_tables, dotted_values(), model_tables())


def _with_tables(
    values: Mapping[str, object], tables: Mapping[str, Mapping[str, object]]
) -> Settings:
    loaded = load_settings(config_path=_NO_FILE, environ=as_variables(values), flags={})
    return overlaid(loaded, tomllib.loads(as_tables_toml(tables))).settings


def _requests() -> st.SearchStrategy[SequenceRequest]:
    values = {name: values_of(hint) for name, hint in get_type_hints(SequenceRequest).items()}
    values["prompt"] = st.lists(_KEYS, min_size=1).map(tuple)
    values["max_tokens"] = _COUNTS
    return st.builds(SequenceRequest, **values)


_SPECIAL: Mapping[object, Callable[[], st.SearchStrategy[object]]] = {
    NoneType: st.none,
    UnsetType: lambda: st.just(UNSET),
    bool: st.booleans,
    int: lambda: st.integers(-(2**63), 2**64 - 1),
    float: st.floats,
    str: st.text,
    bytes: st.binary,
    PlainArray: lambda: st.builds(PlainArray, **_parts(PlainArray)),
    memoryview: lambda: st.binary().map(memoryview),
    Grammar: lambda: st.builds(
        Grammar,
        st.text(),
        st.builds(Constraint),
        st.just(object()),
        st.lists(st.text()).map(tuple),
    ),
    MachdError: lambda: st.sampled_from(ERROR_CLASSES).flatmap(errors_of),
    SequenceRequest: _requests,
    Settings: _settings,
}


@cache
def values_of(kind: object) -> st.SearchStrategy[object]:
    """Values of a type, made from its annotations."""
    if kind in _SPECIAL:
        return _SPECIAL[kind]()
    if isinstance(kind, EnumType):
        return st.sampled_from(list(kind))
    arguments = get_args(kind)
    match get_origin(kind):
        case origin if origin is Union or origin is UnionType:
            return st.one_of(*map(values_of, arguments))
        case origin if origin is tuple and arguments[-1] is Ellipsis:
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        case origin if origin is tuple:
            return st.tuples(*map(values_of, arguments))
        case origin if origin is frozenset:
            return st.frozensets(values_of(arguments[0]), max_size=3)
        case origin if origin is Mapping:
            return st.dictionaries(*map(values_of, arguments), max_size=3)
    assert isinstance(kind, type), f"no values of {kind}"
    assert issubclass(kind, Struct) or is_dataclass(kind), f"no values of {kind.__name__}"
    # Deferred, because a layer of a cache may hold layers.
    return st.deferred(lambda: st.builds(kind, **_parts(kind)))


def _parts(kind: type) -> dict[str, st.SearchStrategy[object]]:
    return {name: values_of(hint) for name, hint in get_type_hints(kind).items()}


def comparable(value: object) -> object:
    """Return a value's type and parts: equal for NaN, for errors and for images, which are not equal themselves."""
    match value:
        case MachdError():
            return type(value), value.args, comparable(vars(value))
        case Grammar():
            return type(value), value.source, value.constraint, value.ignored_keywords
        case float() if isnan(value):
            return float, "NaN"
        case tuple():
            return tuple, [comparable(one) for one in value]
        case Mapping():
            return Mapping, {name: comparable(one) for name, one in value.items()}
        case Struct():
            return type(value), comparable(structs.asdict(value))
        case _ if is_dataclass(value) or isinstance(value, PlainArray):
            return type(value), {
                name: comparable(getattr(value, name)) for name in get_type_hints(type(value))
            }
        case _:
            return type(value), value
