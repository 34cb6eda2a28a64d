"""Decoding of bodies: bytes to a wire type, or to an error that says what was expected.

Decoding is strict: a text does not count as a number, nor a number as a boolean. A number without a fraction is an
integer however it is written (``4.0``), as JSON Schema has it. A key that occurs twice counts as its last
occurrence, here and in :func:`unknown_fields` alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, inspect

from machd.errors import InvalidRequestError

T = TypeVar("T")

# msgspec gives the place of a mistake in the text of its error only: "WHAT - at `$.a[0].b`", or
# "- at `key` in `$.a`" for the key of a mapping. WHAT can quote the client; the place cannot.
_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_QUOTES_CLIENT = re.compile(r"Invalid (?:enum )?value ")
_SAFE_WORDS = re.compile(r"(?:Expected `|Number out of range|Integer value out of range)")
_JSON_WORDS = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
}
_PYTHON_WORD = re.compile(r"\b(?:int|float|str|bool)\b")

_FLOAT_FOR_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_EXACT_INTEGERS = 2.0**53
"""Below this a float is one integer and no other."""

_LOGGABLE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_UNLOGGABLE = "?"
_MAX_UNKNOWN_FIELDS = 32


def decode_body(body: bytes, type_: type[T]) -> T:
    """Decode a request's body.

    msgspec keeps what it learns of a Struct on the Struct itself, so nothing is cached here.

    Raises:
        InvalidRequestError: Whatever is wrong with the bytes. ``param`` is the field where there
            is one, spelled like ``messages[0].role``; the message quotes nothing of the body.
    """
    if not body:
        raise InvalidRequestError("The body is empty; send a JSON object")
    try:
        # By way of text, because msgspec does not look at the encoding of what it skips.
        text = body.decode("utf-8")
        try:
            return msgspec.json.decode(text, type=type_)
        except msgspec.ValidationError as error:
            if _FLOAT_FOR_INTEGER.match(str(error)) is None:
                raise
            return msgspec.json.decode(_with_integers(text), type=type_)
    except msgspec.ValidationError as error:
        raise _wrong_shape(str(error), type_) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"The body is not valid JSON: {_json_problem(error)}") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"The body is not valid UTF-8 (byte {error.start}); send JSON in UTF-8"
        ) from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply") from None


def unknown_fields(body: bytes, type_: type[Struct]) -> tuple[str, ...]:
    """Names of the body's fields that the type does not have, for a debug log.

    The values are skipped, not decoded. At most 32 names, sorted; one that does not look like a
    name (``[A-Za-z0-9_.-]``, up to 64 characters) stands there as ``?``.

    Raises:
        InvalidRequestError: The body is not a JSON object; not after :func:`decode_body`
            accepted it.
    """
    # Not by ``structs.fields``, which reads the annotations of the type again: two milliseconds for a chat.
    known = frozenset(type_.__struct_encode_fields__)
    names = {
        name if _LOGGABLE_NAME.fullmatch(name) else _UNLOGGABLE
        for name in decode_body(body, dict[str, Raw])
        if name not in known
    }
    return tuple(sorted(names)[:_MAX_UNKNOWN_FIELDS])


def _with_integers(text: str) -> bytes:
    """The same JSON, with numbers that have no fraction written as integers.

    Raises:
        msgspec.DecodeError: A part that the type skips is not JSON that can be read.
    """
    return msgspec.json.encode(_integral(msgspec.json.decode(text)))


def _integral(value: object) -> object:
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_INTEGERS:
        return int(value)
    if isinstance(value, dict):
        return {key: _integral(one) for key, one in value.items()}
    return [_integral(one) for one in value] if isinstance(value, list) else value


def _json_problem(error: msgspec.DecodeError) -> str:
    """The parser's words, which hold positions and nothing of the body."""
    words = str(error).removeprefix("JSON is malformed: ")
    if "truncated" in words:
        # The parser sees a lone \ud800 at the end of a string as a missing second half.
        return "it ends too early, or in half of a \\u surrogate pair"
    return words


def _wrong_shape(words: str, type_: object) -> InvalidRequestError:
    match = _PLACE.fullmatch(words)
    assert match is not None, "the pattern takes any text"
    what, path = match["what"], match["path"] or ""
    if missing := _MISSING.fullmatch(what):
        param = _param(f"{path}.{missing['field']}")
        return InvalidRequestError.at(param, "required, but missing")
    param = _param(path)
    place = f"{param or 'The body'}{', as a key' if match['key'] else ''}"
    return InvalidRequestError(f"{place}: {_expectation(what, path, type_)}", param=param or None)


def _expectation(what: str, path: str, type_: object) -> str:
    """Name the expected value, in JSON's words and without the client's."""
    if _QUOTES_CLIENT.match(what):
        return "expected one of " + ", ".join(f'"{one}"' for one in expected_values(type_, path))
    if _SAFE_WORDS.match(what):
        in_json = _PYTHON_WORD.sub(lambda word: _JSON_WORDS[word[0]], what)
        return in_json[0].lower() + in_json[1:]
    return "not what this field takes"


def _param(path: str) -> str:
    """OpenAI's spelling of msgspec's path: no root, no keys of mappings."""
    return path.removeprefix(".").replace("[...]", "")


_STEP = re.compile(r"\.(?P<field>\w+)|\[[^\]]*\]")


def expected_values(type_: object, path: str) -> tuple[str, ...]:
    """Sorted values of the literals and union tags at a path, such as ``.messages[0].role``.

    An index or a key of the path is any index or key.
    """
    values: set[str] = set()
    nodes = list(_alternatives([inspect.type_info(type_)]))
    for step in _STEP.finditer(path):
        values = set(_tags(nodes, step["field"]))
        nodes = list(_alternatives(_children(nodes, step["field"])))
    for node in nodes:
        if isinstance(node, inspect.LiteralType):
            values.update(str(value) for value in node.values)
    return tuple(sorted(values))


def _alternatives(nodes: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """The nodes with unions and annotations opened up."""
    for node in nodes:
        if isinstance(node, inspect.UnionType):
            yield from _alternatives(node.types)
        elif isinstance(node, inspect.Metadata):
            yield from _alternatives([node.type])
        else:
            yield node


def _tags(nodes: Iterable[inspect.Type], field: str | None) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, inspect.StructType) and field and node.tag_field == field:
            yield str(node.tag)


def _children(nodes: Iterable[inspect.Type], field: str | None) -> Iterator[inspect.Type]:
    """Return the type under one step: a struct's field, a list's items or a mapping's values."""
    for node in nodes:
        if isinstance(node, inspect.StructType):
            yield from (one.type for one in node.fields if one.encode_name == field)
        elif field is None and isinstance(node, inspect.ListType):
            yield node.item_type
        elif field is None and isinstance(node, inspect.DictType):
            yield node.value_type
