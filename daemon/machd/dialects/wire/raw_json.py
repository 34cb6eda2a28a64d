"""Parts of a body that stay JSON text until they are needed: schemas and arguments.

msgspec skips such a part without looking whether it can be read (``1e999``, half a surrogate
pair), so it is read here once, and what comes out is known to be an object. How deep and how
branched it is, is counted in its text before: two megabytes of brackets would become a million
objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, TypeAlias, TypeGuard, cast

import msgspec
from msgspec import Meta, Raw, UnsetType

from machd.dialects.wire.bounds import MAX_SCHEMA_BYTES
from machd.errors import InvalidRequestError

_NULL = b"null"

_MAX_NESTING = 64
"""Levels of a value that a template writes out or a compiler walks: more than any schema has."""

_MAX_CONTAINERS = 20_000
"""Objects and arrays of all parts that share an allowance."""

_STRUCTURE = b'"[]{}'
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

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

Content: TypeAlias = Annotated[
    Raw | UnsetType,
    Meta(
        description="A text, or an object or an array, which is read as its JSON text.",
        extra_json_schema={"type": ["string", "object", "array", "null"]},
    ),
]
"""A text, or JSON to be read as one; null and left out are alike."""


@dataclass(slots=True)
class Allowance:
    """Bound on the raw parts of one request together; each takes its share before it is decoded.

    Attributes:
        containers: Objects and arrays that are left.
        length_bytes: Bytes of JSON that are left; None where another bound holds.
    """

    containers: int = _MAX_CONTAINERS
    length_bytes: int | None = None

    def take(self, raw: Raw | str, *, param: str) -> None:
        """Take what a part needs.

        Raises:
            InvalidRequestError: There is not enough left, or it is nested more deeply than
                templates and compilers can stand.
        """
        if self.length_bytes is not None:
            self.length_bytes -= _length_bytes(raw)
            if self.length_bytes < 0:
                raise _beyond(param, "bytes of JSON")
        brackets = _brackets(raw.encode("utf-8", "replace") if isinstance(raw, str) else bytes(raw))
        self.containers -= brackets.count(b"[") + brackets.count(b"{")
        if self.containers < 0:
            raise _beyond(param, "objects and arrays")
        if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > _MAX_NESTING:
            raise InvalidRequestError.at(param, f"nested more than {_MAX_NESTING} levels deep")


def is_given(raw: Raw | UnsetType) -> TypeGuard[Raw]:
    """Return True if there is a value that is not null."""
    return isinstance(raw, Raw) and bytes(raw) != _NULL


def raw_object(
    raw: Raw | str,
    *,
    param: str,
    max_bytes: int | None = MAX_SCHEMA_BYTES,
    allowance: Allowance | None = None,
) -> dict[str, object]:
    """The object that a piece of JSON text is.

    ``max_bytes`` is None where another bound holds; without ``allowance`` it has one of its own.

    Raises:
        InvalidRequestError: It is too long or branched, nested too deeply, or no JSON object.
    """
    if max_bytes is not None and _length_bytes(raw) > max_bytes:
        raise InvalidRequestError.at(param, f"longer than the {max_bytes} bytes that it may have")
    (allowance or Allowance()).take(raw, param=param)
    decoded = _decoded(raw, param)
    if not isinstance(decoded, dict):
        raise InvalidRequestError.at(param, "expected a JSON object")
    return cast("dict[str, object]", decoded)


def content_text(raw: Raw | UnsetType, *, param: str, allowance: Allowance) -> str:
    """Return the text of a :data:`Content`: JSON on one line, in the client's order; empty for null.

    Raises:
        InvalidRequestError: It is a number or a boolean, cannot be read, or holds too much for its allowance.
    """
    if not is_given(raw):
        return ""
    allowance.take(raw, param=param)
    return text_of(_decoded(raw, param), param=param)


def text_of(value: object, *, param: str) -> str:
    """Return a decoded :data:`Content` as :func:`content_text` does; InvalidRequestError for another type."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, dict | list):
        raise InvalidRequestError.at(param, "expected a text, an object or an array")
    return msgspec.json.encode(value).decode()


def raw_schema_text(raw: Raw, *, param: str) -> str:
    """The text of a schema that comes as an object or, as in vLLM's API, as its JSON text, checked."""
    text = bytes(raw).decode()
    if text.startswith('"'):
        inner = _decoded(raw, param)
        assert isinstance(inner, str), "what begins with a quote and can be read is a string"
        text = inner
    raw_object(text, param=param)
    return text


def _beyond(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError.at(
        param, f"more {what} than one request may hold, counting the parts before it"
    )


def _length_bytes(raw: Raw | str) -> int:
    return memoryview(raw).nbytes if isinstance(raw, Raw) else len(raw.encode("utf-8", "replace"))


def _decoded(raw: Raw | str, param: str) -> object:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise InvalidRequestError.at(param, "not valid JSON") from None
    except RecursionError:
        raise InvalidRequestError.at(param, "nested too deeply") from None


def _brackets(text: bytes) -> bytes:
    """The brackets of JSON text that stand in no string; of malformed text, up to its fault.

    Made of a few searches that run in C, as the text may be megabytes.
    """
    # Backslashes pair up from the left of their run, so what is left before a quote escapes it.
    unescaped = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Quotes side by side change nothing: they hold no bracket, or none stands between two strings.
    marks = unescaped.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    return b"".join(marks.split(b'"')[::2])
