"""How big a JSON schema may be, before a compiler sees it.

The compiler's time grows with the square of an object's properties: 1,000 take 0.1 s, 10,000 took
12 s. The other bounds keep its memory and the depth of its recursion small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from machd.errors import GrammarError

__all__ = ["MAX_CHOICES", "check_schema", "decode_schema"]

MAX_SOURCE_CHARACTERS = 262_144
MAX_DEPTH = 64
MAX_SUBSCHEMAS = 8192
MAX_PROPERTIES = 1000
"""Over the whole schema."""
MAX_CHOICES = 4096
"""Values of all ``enum`` lists together, or of one ``guided_choice``."""


def decode_schema(source: str, *, param: str) -> object:
    """A schema as Python values.

    Raises:
        GrammarError: It is too long, or no JSON.
    """
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise GrammarError(f"{param}: longer than {MAX_SOURCE_CHARACTERS} characters", param=param)
    try:
        return msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError):
        raise GrammarError(f"{param}: not a JSON schema", param=param) from None


def check_schema(schema: object, *, param: str) -> None:
    """Hold a schema against the bounds.

    Raises:
        GrammarError: It is beyond one of them.
    """
    if not isinstance(schema, dict):
        raise GrammarError(f"{param}: a JSON schema is an object", param=param)
    properties = choices = 0
    for number, (depth, part) in enumerate(_parts(schema), start=1):
        properties += _length(part, "properties", dict)
        choices += _length(part, "enum", list)
        for value, limit, name in (
            (depth, MAX_DEPTH, "levels"),
            (number, MAX_SUBSCHEMAS, "parts"),
            (properties, MAX_PROPERTIES, "properties"),
            (choices, MAX_CHOICES, "enum values"),
        ):
            if value > limit:
                raise GrammarError(f"{param}: the schema has more than {limit} {name}", param=param)


def _parts(schema: object) -> Iterator[tuple[int, dict[str, object]]]:
    """Every object in the schema with its depth, without recursion."""
    stack = [(0, schema)]
    while stack:
        depth, part = stack.pop()
        inner: Iterable[object] = ()
        if isinstance(part, dict):
            yield depth, part
            inner = part.values()
        elif isinstance(part, list):
            inner = part
        stack.extend((depth + 1, one) for one in inner if isinstance(one, dict | list))


def _length(
    part: dict[str, object], key: str, kind: type[dict[str, object]] | type[list[object]]
) -> int:
    value = part.get(key)
    return len(value) if isinstance(value, kind) else 0
