"""Errors as data: the name of a class of :mod:`machd.errors`, and the attributes of an instance.

Codes and statuses belong to the class, so both processes have them. The cause of an error stays in the process that
caught it, and is in its log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, get_origin, get_type_hints

from msgspec import ValidationError, convert

from machd.errors import MachdError


def _with_subclasses(error_class: type[MachdError]) -> Iterator[type[MachdError]]:
    yield error_class
    for one in error_class.__subclasses__():
        yield from _with_subclasses(one)


def _attribute_types(error_class: type[MachdError]) -> dict[str, object]:
    hints = get_type_hints(error_class)
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


_CLASSES = {one.__name__: one for one in _with_subclasses(MachdError)}
_ATTRIBUTE_TYPES = {name: _attribute_types(one) for name, one in _CLASSES.items()}


def error_as_data(error: MachdError) -> tuple[str, dict[str, object]]:
    """Return the class's name, and the attributes by name."""
    name = type(error).__name__
    attributes = {one: getattr(error, one) for one in _ATTRIBUTE_TYPES[name]}
    # The name of a file may have bytes that are not UTF-8, which msgpack would refuse.
    attributes["message"] = error.message.encode(errors="backslashreplace").decode()
    return name, attributes


def error_from_data(data: object) -> MachdError:
    """Return the error that :func:`error_as_data` has read, without its cause.

    Raises:
        ValidationError: The data are no error of machd, or have other attributes.
    """
    name, attributes = convert(data, tuple[str, dict[str, object]])
    error_class, types = _CLASSES.get(name), _ATTRIBUTE_TYPES.get(name, {})
    if error_class is None:
        raise ValidationError(f"machd has no error {name}")
    if attributes.keys() != types.keys():
        raise ValidationError(f"{name} has the attributes {', '.join(types)}")
    error = error_class.__new__(error_class)
    for attribute, kind in types.items():
        setattr(error, attribute, convert(attributes[attribute], kind))
    error.args = (error.message,)
    return error
