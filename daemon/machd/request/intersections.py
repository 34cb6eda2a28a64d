"""Intersections and complements of patterns, and multiples: constraints whose time no limit of llguidance bounds.

A grammar follows an intersection by the product of its parts: 22 patterns in one ``allOf`` took a minute
and 1 GB. The multiples of a number are as many states as it has values: 1,000,003 took 7 s. Everything else
costs time in proportion to its text. The judgement errs on the side of an intersection: one that is
found costs a process, one that is missed could hold up a batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal

from machd.request.constraint import Constraint, ConstraintKind

_ANNOTATIONS = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "example",
        "examples",
        "nullable",
        "readOnly",
        "title",
        "writeOnly",
        "x-guidance",
    }
)
"""Keywords beside which a reference or an alternative is no part of an intersection."""

_MAX_FORBIDDEN_CHARACTERS = 2000
"""Of a list of forbidden texts, which is the complement of a search."""

_MAX_FACTOR = 1000
_FACTOR_DIGITS = 3
"""Of a ``multipleOf`` that costs no more than some milliseconds."""

_EMBEDDED_SCHEMA = re.compile(r"^\w+: %json (.*)$", re.MULTILINE)
"""A schema in the Lark that machd writes: a rule of its own, on one line. Inside of a literal the mark is a client's text."""


def has_unbounded_cost(constraint: Constraint) -> bool:
    """Tell whether a constraint of a client's intersects or complements patterns, or has large multiples."""
    source = constraint.source
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _has_unbounded_part(json.loads(source))
        case ConstraintKind.CALLS:
            return any(
                _has_unbounded_part(json.loads(found[1]))
                for found in _EMBEDDED_SCHEMA.finditer(source)
            )
        case ConstraintKind.GRAMMAR:
            # Lark's operators, and what embeds schemas; GBNF has neither. Inside of a literal they
            # count as well.
            return any(mark in source for mark in ("&", "~", "%json", "%regex"))
        case ConstraintKind.FORBIDDEN:
            return len(source) > _MAX_FORBIDDEN_CHARACTERS
        case ConstraintKind.JSON_OBJECT | ConstraintKind.REGEX | ConstraintKind.CHOICE:
            return False


def combines_schemas(schema: Mapping[str, object]) -> bool:
    """Tell whether several schemas speak about the same value here."""
    assertions = schema.keys() - _ANNOTATIONS
    members = schema.get("allOf")
    if isinstance(members, list) and len(members) > 1:
        return True
    return len(assertions) > 1 and bool(assertions & {"$ref", "allOf", "anyOf", "oneOf"})


def _has_unbounded_part(schema: object) -> bool:
    return any(_is_unbounded(part) for part in objects_in(schema))


def _is_unbounded(schema: Mapping[str, object]) -> bool:
    if combines_schemas(schema):
        return True
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping) and len(patterns) + ("properties" in schema) > 1:
        return True
    return ("pattern" in schema and "format" in schema) or _has_large_multiples(schema)


def _has_large_multiples(schema: Mapping[str, object]) -> bool:
    factor = schema.get("multipleOf")
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        return False
    digits = Decimal(str(factor)).normalize().as_tuple().digits
    return factor > _MAX_FACTOR or len(digits) > _FACTOR_DIGITS


def objects_in(schema: object) -> Iterator[Mapping[str, object]]:
    """Every object inside a schema and itself, those that are no schemas as well."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping):
            yield part
            stack.extend(part.values())
        elif isinstance(part, list):
            stack.extend(part)
