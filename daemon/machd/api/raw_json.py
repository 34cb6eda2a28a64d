"""Parts of a body that stay JSON text until somebody needs them: schemas and arguments.

msgspec skips such a part without looking whether it can be read (``1e999``, half a surrogate
pair), so it is read here once, and what comes out is known to be an object.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, cast

import msgspec
from msgspec import Meta, Raw, UnsetType

from machd.api.bounds import MAX_SCHEMA_BYTES
from machd.errors import InvalidRequestError

__all__ = [
    "JsonObject",
    "ObjectSource",
    "OptionalSchema",
    "Schema",
    "check_nesting",
    "is_given",
    "raw_object",
    "raw_schema_text",
]

_NULL = b"null"

_MAX_NESTING = 64
"""Levels of a value that a template writes out or a compiler walks: more than any schema has."""

Schema: TypeAlias = Annotated[
    Raw, Meta(description="A JSON schema.", extra_json_schema={"type": "object"})
]
"""A JSON schema that has to be there; kept as text."""

OptionalSchema: TypeAlias = Annotated[
    Raw | UnsetType,
    Meta(description="A JSON schema, or null.", extra_json_schema={"type": ["object", "null"]}),
]
"""A JSON schema that may be null or left out; kept as text."""

JsonObject: TypeAlias = Annotated[
    Raw, Meta(description="A JSON object.", extra_json_schema={"type": "object"})
]
"""An object that has to be there; kept as text."""

ObjectSource: TypeAlias = Annotated[
    Raw | UnsetType,
    Meta(
        description="A JSON schema, as an object or as its JSON text.",
        extra_json_schema={"type": ["object", "string", "null"]},
    ),
]
"""A JSON schema as vLLM takes it."""


def is_given(raw: Raw | UnsetType) -> bool:
    """Whether there is a value that is not null."""
    return isinstance(raw, Raw) and bytes(raw) != _NULL


def raw_object(
    raw: Raw | str, *, param: str, max_bytes: int | None = MAX_SCHEMA_BYTES
) -> dict[str, object]:
    """The object that a piece of JSON text is.

    Args:
        raw: JSON text.
        param: Where it stands in the request.
        max_bytes: How long it may be; None where another bound holds.

    Raises:
        InvalidRequestError: It is too long, nested too deeply, or no JSON object.
    """
    size = memoryview(raw).nbytes if isinstance(raw, Raw) else len(raw)
    if max_bytes is not None and size > max_bytes:
        raise InvalidRequestError(
            f"{param}: longer than the {max_bytes} bytes that it may have", param=param
        )
    decoded = _decoded(raw, param)
    if not isinstance(decoded, dict):
        raise InvalidRequestError(f"{param}: expected a JSON object", param=param)
    check_nesting(decoded, param=param)
    return cast("dict[str, object]", decoded)


def check_nesting(value: object, *, param: str) -> None:
    """Refuse a JSON value that is nested more deeply than templates and compilers can stand.

    Raises:
        InvalidRequestError: It is.
    """
    level = [value]
    for _ in range(_MAX_NESTING):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise InvalidRequestError(f"{param}: nested more than {_MAX_NESTING} levels deep", param=param)


def raw_schema_text(raw: Raw, *, param: str) -> str:
    """The text of a schema that comes as an object or, as in vLLM's API, as its JSON text.

    Raises:
        InvalidRequestError: As :func:`raw_object`.
    """
    text = bytes(raw).decode()
    if text.startswith('"'):
        inner = _decoded(raw, param)
        assert isinstance(inner, str), "what begins with a quote and can be read is a string"
        text = inner
    raw_object(text, param=param)
    return text


def _decoded(raw: Raw | str, param: str) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise InvalidRequestError(f"{param}: not valid JSON", param=param) from None
    except RecursionError:
        raise InvalidRequestError(f"{param}: nested too deeply", param=param) from None


def _inside(value: object) -> list[object]:
    """The containers right inside a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return []
    return [one for one in value if isinstance(one, dict | list)]
