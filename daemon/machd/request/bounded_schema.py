"""Bound the answers that a JSON schema allows: closed objects, integers of 64 bits.

JSON Schema leaves objects open and integers endless. A small model that may add keys or digits adds them
until the token limit. So an object schema is closed where it names keys and says nothing about others,
and an integer without bounds has those of 64 bits; llama.cpp does both. A schema that is one part of an
intersection (``allOf``, or ``$ref`` beside ``properties``) stays open: closed, it would forbid the keys
of the other parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

Schema: TypeAlias = Mapping[str, object]

_MAPPINGS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_LISTS_OF_SCHEMAS = ("prefixItems",)
_ALTERNATIVES = ("anyOf", "oneOf")

_MAX_INTEGER = 2**63 - 1024
"""The largest 64-bit integer that is also a float, as which llguidance reads bounds."""


def bounded_schema(schema: Schema) -> dict[str, object]:
    """A schema whose objects hold no key that they do not name, and whose integers have bounds.

    It is at most as deep as :mod:`machd.request.schema_bounds` allows.

    Returns:
        A copy; the given one is not changed.
    """
    return _Closing(schema).close(schema)


class _Closing:
    """A schema and those of its parts that have to stay open because a reference leads to them."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._open_parts: set[int] = set()
        self._mark_referenced(root)

    def close(self, schema: Schema, *, is_part: bool = False) -> dict[str, object]:
        """Close a schema and all inside it; ``is_part`` if it is one part of an intersection."""
        is_open = is_part or id(schema) in self._open_parts
        is_intersection = is_open or _is_intersection(schema)
        closed = {key: self._closed_value(key, value) for key, value in schema.items()}
        for key in (*_ALTERNATIVES, "allOf"):
            if isinstance(members := schema.get(key), list):
                closed[key] = [
                    self.close(one, is_part=is_intersection) if isinstance(one, Mapping) else one
                    for one in members
                ]
        if not is_intersection and _can_be_closed(schema):
            closed["additionalProperties"] = False
        return closed | _integer_bounds(schema)

    def _closed_value(self, key: str, value: object) -> object:
        """The value of a keyword, schemas of parts and definitions closed."""
        if key in _MAPPINGS_OF_SCHEMAS and isinstance(value, Mapping):
            return {name: self._closed_part(one) for name, one in value.items()}
        if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            return [self._closed_part(one) for one in value]
        return self._closed_part(value) if key in _SCHEMAS else value

    def _closed_part(self, value: object) -> object:
        return self.close(value) if isinstance(value, Mapping) else value

    def _mark_referenced(self, schema: Schema) -> None:
        """Find the targets of references that stand in intersections."""
        self._mark_same_value(schema, is_part=False)
        for part in _parts(schema):
            self._mark_referenced(part)

    def _mark_same_value(self, schema: Schema, *, is_part: bool) -> None:
        is_intersection = is_part or _is_intersection(schema)
        if is_intersection and (target := self._target(schema.get("$ref"))) is not None:
            if id(target) in self._open_parts:
                return
            self._open_parts.add(id(target))
            self._mark_same_value(target, is_part=True)
        for member in _members(schema):
            self._mark_same_value(member, is_part=is_intersection)

    def _target(self, reference: object) -> Schema | None:
        """The schema that a reference inside this schema names; None for any other."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        place: object = self._root
        for step in reference.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            place = place.get(name) if isinstance(place, Mapping) else None
        return place if isinstance(place, Mapping) else None


def _is_intersection(schema: Schema) -> bool:
    """Return True if several schemas speak about the keys of one object."""
    all_of = schema.get("allOf")
    count = len(all_of) if isinstance(all_of, list) else 0
    count += "properties" in schema or "patternProperties" in schema
    count += sum(key in schema for key in (*_ALTERNATIVES, "$ref", "if", "dependentSchemas"))
    return count > 1


def _can_be_closed(schema: Schema) -> bool:
    """Return True if an object schema can be met with the keys that it names, and is silent about others."""
    if "additionalProperties" in schema or "unevaluatedProperties" in schema:
        return False
    has_patterns = "patternProperties" in schema
    properties = schema.get("properties", {} if has_patterns else None)
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    return (
        isinstance(properties, Mapping)
        and isinstance(required, list)
        and all(name in properties for name in required if isinstance(name, str))
        and isinstance(least, int)
        and (has_patterns or least <= len(properties))
    )


def _integer_bounds(schema: Schema) -> dict[str, object]:
    """The bounds that an integer schema lacks."""
    type_ = schema.get("type")
    types = type_ if isinstance(type_, list) else [type_]
    bounds: dict[str, object] = {}
    if "integer" in types and "number" not in types:
        if "minimum" not in schema and "exclusiveMinimum" not in schema:
            bounds["minimum"] = -_MAX_INTEGER
        if "maximum" not in schema and "exclusiveMaximum" not in schema:
            bounds["maximum"] = _MAX_INTEGER
    return bounds


def _members(schema: Schema) -> Iterator[Schema]:
    """Schemas that speak about the same value as this one."""
    for key in (*_ALTERNATIVES, "allOf"):
        members = schema.get(key)
        for one in members if isinstance(members, list) else ():
            if isinstance(one, Mapping):
                yield one


def _parts(schema: Schema) -> Iterator[Schema]:
    """Schemas inside this one that speak about other values, and its definitions."""
    values: list[object] = [schema.get(key) for key in _SCHEMAS]
    for key in _MAPPINGS_OF_SCHEMAS:
        if isinstance(named := schema.get(key), Mapping):
            values += named.values()
    for key in _LISTS_OF_SCHEMAS:
        if isinstance(listed := schema.get(key), list):
            values += listed
    for member in _members(schema):
        values += _parts(member)
    yield from (one for one in values if isinstance(one, Mapping))
