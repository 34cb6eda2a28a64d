"""Bounds on schemas, patterns and grammars, checked before a compiler sees them.

The compiler's time grows with the square of an object's properties (1,000 take 0.1 s, 10,000 took
12 s), its memory with everything else. What a text has to spell letter by letter is bounded, too:
it is worked out at once, between two steps of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from machd.errors import GrammarError
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.grammar_bounds import LITERAL

MAX_SOURCE_CHARACTERS = 262_144
"""Of a JSON schema, or of a list of choices."""
MAX_GRAMMAR_CHARACTERS = 65_536
MAX_PATTERN_CHARACTERS = 4096
MAX_LITERAL_CHARACTERS = 4096
"""Of one text that is fixed: a constant, a choice, a name, a literal of a grammar."""
MAX_DEPTH = 64
MAX_SUBSCHEMAS = 8192
MAX_PROPERTIES = 1000
"""Over the whole schema, and over those of all tools together."""
MAX_CHOICES = 4096
"""Values of all ``enum`` lists together, or of one ``guided_choice``."""

UNSUPPORTED_KEYWORDS = (
    "$dynamicRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
)
"""Keywords that change what is valid and that no grammar expresses."""

_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
"""What JSON can only write with an escape that grammars leave out; see ``engine/grammar/grammar.py``."""


def check_constraint(constraint: Constraint) -> None:
    """Hold a constraint of a client's against the bounds of its kind.

    Raises:
        GrammarError: It is beyond one of them, or cannot be read.
    """
    param, source = constraint.param, constraint.source
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            check_schema(_read(source, param), param=param)
        case ConstraintKind.CHOICE | ConstraintKind.FORBIDDEN:
            read_choices(constraint)
        case ConstraintKind.REGEX:
            _check_length(source, MAX_PATTERN_CHARACTERS, param)
        case ConstraintKind.GRAMMAR:
            _check_length(source, MAX_GRAMMAR_CHARACTERS, param)
            for literal in LITERAL.finditer(source):
                _check_length(literal[0], MAX_LITERAL_CHARACTERS, param)
        case ConstraintKind.JSON_OBJECT | ConstraintKind.CALLS:
            pass


def read_choices(constraint: Constraint) -> list[str]:
    """The texts of a choice, or those that are forbidden.

    Raises:
        GrammarError: There are none or too many, or one is too long.
    """
    param = constraint.param
    _check_length(constraint.source, MAX_SOURCE_CHARACTERS, param)
    choices = msgspec.json.decode(constraint.source, type=list[str])
    if not 0 < len(choices) <= MAX_CHOICES:
        raise GrammarError.at(param, f"send 1 to {MAX_CHOICES} choices")
    for choice in choices:
        _check_length(choice, MAX_LITERAL_CHARACTERS, param)
    return choices


def check_schema(schema: object, *, param: str) -> None:
    """Hold a schema against the bounds.

    Raises:
        GrammarError: It is beyond one of them.
    """
    if not isinstance(schema, dict):
        raise GrammarError.at(param, "a JSON schema is an object")
    check_schemas([schema], param=param)


def check_schemas(schemas: Sequence[object], *, param: str) -> None:
    """Hold several schemas against the bounds, as if they were one.

    Raises:
        GrammarError: Together they are beyond one of them.
    """
    if any(isinstance(schema, dict) and "x-guidance" in schema for schema in schemas):
        raise GrammarError.at(param, "x-guidance is not supported; leave it out")
    properties = choices = 0
    for number, (depth, part) in enumerate(_parts(schemas), start=1):
        for constant in _constants(part):
            _check_constant(constant, param)
        properties += _length(part, "properties", dict)
        choices += _length(part, "enum", list)
        for value, limit, name in (
            (depth, MAX_DEPTH, "levels"),
            (number, MAX_SUBSCHEMAS, "parts"),
            (properties, MAX_PROPERTIES, "properties"),
            (choices, MAX_CHOICES, "enum values"),
        ):
            if value > limit:
                raise GrammarError.at(param, f"more than {limit} {name}")


def _read(source: str, param: str) -> object:
    _check_length(source, MAX_SOURCE_CHARACTERS, param)
    try:
        return msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError):
        raise GrammarError.at(param, "not a JSON schema") from None


def _check_length(text: str, limit: int, param: str) -> None:
    if len(text) > limit:
        raise GrammarError.at(param, f"a text of more than {limit} characters")


def _parts(schemas: Sequence[object]) -> Iterator[tuple[int, dict[str, object]]]:
    """Every object in the schemas with its depth, without recursion."""
    stack = [(0, schema) for schema in schemas]
    while stack:
        depth, part = stack.pop()
        inner: Iterable[object] = ()
        if isinstance(part, dict):
            yield depth, part
            inner = part.values()
        elif isinstance(part, list):
            inner = part
        stack.extend((depth + 1, one) for one in inner if isinstance(one, dict | list))


def _constants(part: dict[str, object]) -> Iterator[object]:
    """Yield the texts that may have to be spelt letter by letter: names, and values that are fixed."""
    yield from part  # where they are no keywords they are names, or inside of a constant
    for key in ("const", "pattern"):
        yield part.get(key)
    for key in ("enum", "required"):
        value = part.get(key)
        yield from value if isinstance(value, list) else ()


def _check_constant(value: object, param: str) -> None:
    if not isinstance(value, str):
        return
    _check_length(value, MAX_LITERAL_CHARACTERS, param)
    if _CONTROL.search(value):
        raise GrammarError.at(
            param,
            "names and constants cannot hold control characters other than \\b, \\t, "
            "\\n, \\f and \\r",
        )


def _length(
    part: dict[str, object], key: str, kind: type[dict[str, object]] | type[list[object]]
) -> int:
    value = part.get(key)
    return len(value) if isinstance(value, kind) else 0
