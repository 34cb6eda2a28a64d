"""Random JSON schemas of every keyword that grammars take, alone, in pairs and nested."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_PATTERNS = (
    '^[^"]{1,3}$', '^[^,;"]{1,3}$', r"^[^\\]{1,3}$", "^[^a]{2}$", "[^a]", "^[a-c]+$", "b", "^a|b$", "^$", "x*",
    r"^\d{2}$", r"^\w+$", r"^\s?$", r"^\S{2}$", r"^\D$", '^"', r"^\\?$", ".", "^.{2}$", r"^[^\n]{2}$",
    r"^[\"]{2}$", r"^(a|[^b\"]){2}$", r"^[^\"\\/]{3}$", "^[ -~]{2}$", r"^[!-\]]{2}$", "^é.$", "^[^é]$", r"^[\s\S]{2}$",
)  # fmt: skip
_FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uuid",
    "regex",
)
_NAMES = ("a", "b", "ab", "b1", "é", '"', "x y")
_NAME_PATTERNS = ("^a", "b", "^b.$", "^[^b]$", "1$", "^.$", '^[^a"]+$')


def random_schema(rng: random.Random, depth: int = 0) -> Schema:
    """A schema at most three deep."""
    kinds: list[Callable[[random.Random, int], Schema]]
    kinds = [_string, _string, _number, _number, _integer, _values]
    if depth < 2:
        kinds += [_object, _object, _object, _array, _array, _alternatives, _all_of]
    return rng.choice(kinds)(rng, depth)


def with_reference(rng: random.Random) -> Schema:
    """A random schema behind a reference, which may stand beside other keywords."""
    beside = _some(rng, {"title": "x", "description": "y", "type": "object", "minLength": 1}, 2)
    return {"$ref": "#/$defs/d", "$defs": {"d": random_schema(rng)}, **beside}


def _some(rng: random.Random, values: Schema, most: int = 3) -> Schema:
    names = rng.sample(list(values), rng.randrange(min(most, len(values)) + 1))
    return {name: values[name] for name in names}


def _string(rng: random.Random, _depth: int) -> Schema:
    least = rng.choice((0, 1, 2))
    values = {
        "pattern": rng.choice(_PATTERNS),
        "minLength": least,
        "maxLength": least + rng.choice((0, 1, 2, 5)),
        "format": rng.choice(_FORMATS),
    }
    weights = {"format"} if rng.random() < 0.7 else set()
    return {"type": "string"} | _some(rng, {k: v for k, v in values.items() if k not in weights}, 3)


_NUMBERS = (
    -1e3,
    -20,
    -2.5,
    -1,
    -0.75,
    -0.5,
    -0.1,
    0,
    0.0,
    0.05,
    0.5,
    0.75,
    1,
    1.5,
    2,
    3.25,
    10,
    99.5,
    1000,
)


def _bounds(rng: random.Random) -> Schema:
    low, high = sorted(rng.choices(_NUMBERS, k=2))
    values: Schema = {}
    if rng.random() < 0.7:
        values[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.7:
        values[rng.choice(("maximum", "exclusiveMaximum"))] = high
    if rng.random() < 0.1:
        values[rng.choice(("minimum", "exclusiveMinimum"))] = low
    return values


def _number(rng: random.Random, _depth: int) -> Schema:
    factor = {"multipleOf": rng.choice((0.5, 1, 0.25, 3, 0.1))} if rng.random() < 0.2 else {}
    return {"type": "number"} | _bounds(rng) | factor


def _integer(rng: random.Random, _depth: int) -> Schema:
    factor = {"multipleOf": rng.choice((2, 3, 10, 1))} if rng.random() < 0.2 else {}
    return {"type": "integer"} | _bounds(rng) | factor


def _values(rng: random.Random, _depth: int) -> Schema:
    values = ["a", 'q"', "b\\", 1, -1.5, 0, None, True, [], [1, "a"], {}, {"a": 1}, "é\n"]
    if rng.random() < 0.3:
        return {"const": rng.choice(values)}
    schema: Schema = {"enum": rng.sample(values, rng.randrange(1, 5))}
    return schema | _some(rng, {"type": rng.choice(("string", "number", "object"))}, 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randrange(5))
    least = rng.choice((0, 1, 1, 2, 3))
    schema: Schema = {"type": "object"}
    if names or rng.random() < 0.5:
        schema["properties"] = {name: random_schema(rng, depth + 1) for name in names}
    if rng.random() < 0.25:
        patterns = rng.sample(_NAME_PATTERNS, rng.randrange(1, 3))
        schema["patternProperties"] = {one: random_schema(rng, depth + 1) for one in patterns}
    if rng.random() < 0.5:
        schema["required"] = rng.sample(_NAMES[:4], rng.randrange(3))
    if rng.random() < 0.4:
        schema["additionalProperties"] = rng.choice((False, True, random_schema(rng, depth + 1)))
    counts = {"minProperties": least, "maxProperties": least + rng.choice((0, 1, 2))}
    return schema | (_some(rng, counts, 2) if rng.random() < 0.6 else {})


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.choice((0, 1, 2))
    values = {
        "items": rng.choice((random_schema(rng, depth + 1), False)),
        "prefixItems": [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 3))],
        "minItems": least,
        "maxItems": least + rng.choice((0, 1, 2)),
    }
    return {"type": "array"} | _some(rng, values, 4)


def _alternatives(rng: random.Random, depth: int) -> Schema:
    members = [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    return {rng.choice(("anyOf", "oneOf")): members} | (
        random_schema(rng, 2) if rng.random() < 0.2 else {}
    )


def _all_of(rng: random.Random, depth: int) -> Schema:
    make = rng.choice((_string, _number, _integer, _object))
    return {"allOf": [make(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
