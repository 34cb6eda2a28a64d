"""Intersections and complements of patterns: constraints whose time no limit of llguidance bounds.

A grammar follows an intersection by the product of its parts: 22 patterns in one ``allOf`` took a minute
and 1 GB. Everything else costs time in proportion to its text. The judgement errs on the side of
an intersection: one that is found costs a process, one that is missed could hold up a batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

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

_EMBEDDED_SCHEMA = re.compile(r"%json (.*)")
"""A schema in the Lark that machd writes, one on a line."""


def has_intersections(constraint: Constraint) -> bool:
    """Tell whether a constraint of a client's intersects or complements patterns.

    Args:
        constraint: Within the bounds of :mod:`machd.request.schema_bounds`.
    """
    source = constraint.source
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _intersects(json.loads(source))
        case ConstraintKind.CALLS:
            return any(
                _intersects(json.loads(found[1])) for found in _EMBEDDED_SCHEMA.finditer(source)
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


def _intersects(schema: object) -> bool:
    return any(_is_intersection(part) for part in objects_in(schema))


def _is_intersection(schema: Mapping[str, object]) -> bool:
    if combines_schemas(schema):
        return True
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping) and len(patterns) + ("properties" in schema) > 1:
        return True
    return "pattern" in schema and "format" in schema


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
