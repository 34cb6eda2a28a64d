"""Rewrite a JSON schema into an equal one that llguidance 1.9 reads rightly, and name what stays behind.

Four things are read wrongly: exclusive bounds of numbers that share their integer part, classes of
characters that hold U+0000, ``minProperties`` and ``maxProperties`` beside optional properties,
and a count of properties that are not listed, whose names may come twice.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from machd.request.intersections import combines_schemas, objects_in

Schema: TypeAlias = Mapping[str, object]

_DEFINITIONS = ("$defs", "definitions")
_MAPPINGS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")

_KEPT_OUTSIDE = ("$schema", "$id", "$defs", "definitions", "title", "description", "default")
"""Keywords that an object keeps when it becomes a choice of objects."""

_MAX_ALTERNATIVES = 64
_MAX_ALTERNATIVE_CHARACTERS = 65_536
"""Bounds of objects that become choices: alternatives of one object, and of all in a schema as JSON."""

_FLOAT_DIGITS = 15
"""Digits that every float keeps."""

_NEGATED_CLASS = re.compile(r"\\.|\[\^([-\]]?)", re.DOTALL)
_DEFINITION = re.compile(r"#|#/(\$defs|definitions)/[^/]+")


def expressible_schema(schema: Schema) -> tuple[dict[str, object], frozenset[str]]:
    """Rewrite a schema with bounds, of :func:`machd.request.bounded_schema.bounded_schema`.

    Returns:
        The schema for the compiler, and the keywords that it does not hold any more, or not wholly.
    """
    rewriting = _Rewriting(schema)
    is_part = rewriting.definitions_are_parts
    return rewriting.rewritten(schema, is_part=is_part), frozenset(rewriting.ignored_keywords)


class _Rewriting:
    """The rewriting of one schema, and the keywords that it has given up."""

    def __init__(self, root: Schema) -> None:
        self.ignored_keywords: set[str] = set()
        self._characters = 0
        intersections = [one for one in objects_in(root) if combines_schemas(one)]
        self.definitions_are_parts = any(_references(one) for one in intersections)
        # References to a place inside of an object that becomes a choice would lead nowhere.
        self._may_move = all(_DEFINITION.fullmatch(one) for one in _references(root))

    def rewritten(self, schema: Schema, *, is_part: bool) -> dict[str, object]:
        """Rewrite a schema and all inside it.

        With ``is_part`` another schema may speak about the same value, so that keywords of both belong together.
        """
        is_part = is_part or combines_schemas(schema)
        inner = {key: self._value(key, value, is_part) for key, value in schema.items()}
        if isinstance(pattern := inner.get("pattern"), str):
            inner["pattern"] = _without_nul(pattern)
        if isinstance(patterns := inner.get("patternProperties"), Mapping):
            inner["patternProperties"] = {_without_nul(key): one for key, one in patterns.items()}
        return self._counted(self._bounded(inner, is_part), is_part)

    def _value(self, key: str, value: object, is_part: bool) -> object:  # noqa: FBT001 - see rewritten
        if key in _DEFINITIONS:
            is_part = self.definitions_are_parts
        if key in _MAPPINGS_OF_SCHEMAS and isinstance(value, Mapping):
            return {name: self._part(one, is_part) for name, one in value.items()}
        if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            return [self._part(one, is_part) for one in value]
        return self._part(value, is_part) if key in _SCHEMAS else value

    def _part(self, value: object, is_part: bool) -> object:  # noqa: FBT001 - see rewritten
        return self.rewritten(value, is_part=is_part) if isinstance(value, Mapping) else value

    def _bounded(self, schema: dict[str, object], is_part: bool) -> dict[str, object]:  # noqa: FBT001
        """Move exclusive bounds inward by the last digit of a float, where llguidance takes the bound itself.

        It does so where the bound is an integer and the other bound lies less than 1 away.
        """
        if schema.get("type") == "integer":
            return schema
        low, high = _number(schema, "exclusiveMinimum"), _number(schema, "exclusiveMaximum")
        lows = [one for one in (low, _number(schema, "minimum")) if one is not None]
        highs = [one for one in (high, _number(schema, "maximum")) if one is not None]
        least, most = max(lows, default=None), min(highs, default=None)
        moved = dict(schema)
        if low is not None and low == least and _is_close(low, most, is_part):
            del moved["exclusiveMinimum"]
            moved["minimum"] = low + _last_digit(low)
        if high is not None and high == most and _is_close(high, least, is_part):
            del moved["exclusiveMaximum"]
            moved["maximum"] = high - _last_digit(high)
        return moved

    def _counted(self, schema: dict[str, object], is_part: bool) -> dict[str, object]:  # noqa: FBT001
        """Write counts of properties as a choice of objects whose properties are all required."""
        counts = _PropertyCounts(schema)
        if counts.has_repeatable_names:
            self.ignored_keywords.add("minProperties")
        if counts.are_read_rightly:
            return schema
        alternatives = []
        if schema.get("type") == "object" and self._may_move and not is_part:
            alternatives = list(itertools.islice(counts.alternatives(), _MAX_ALTERNATIVES + 1))
        if len(alternatives) <= _MAX_ALTERNATIVES:
            self._characters += sum(len(json.dumps(one)) for one in alternatives)
        else:
            alternatives = []
        if not alternatives or self._characters > _MAX_ALTERNATIVE_CHARACTERS:
            given_up = {"minProperties", "maxProperties"} & schema.keys()
            self.ignored_keywords |= given_up
            return {key: value for key, value in schema.items() if key not in given_up}
        kept = {key: schema[key] for key in _KEPT_OUTSIDE if key in schema}
        return {**kept, "anyOf": alternatives}


class _PropertyCounts:
    """The counts of an object schema's properties: how many of the optional ones it wants."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        properties, required = schema.get("properties"), schema.get("required")
        self._properties = properties if isinstance(properties, Mapping) else {}
        listed = required if isinstance(required, list) else []
        self._required = list(dict.fromkeys(one for one in listed if isinstance(one, str)))
        self._is_refused = any(not isinstance(one, str) for one in listed)
        self._optional = [
            name
            for name, one in self._properties.items()
            if name not in self._required and one is not False
        ]
        least, most = _count(schema, "minProperties"), _count(schema, "maxProperties")
        self._least = max(0, (least or 0) - len(self._required))
        self._most = None if most is None else most - len(self._required)
        self._is_closed = schema.get("additionalProperties") is False and not schema.get(
            "patternProperties"
        )

    @property
    def has_repeatable_names(self) -> bool:
        """True if names that are not listed have to be counted; a grammar lets one come twice."""
        return not self._is_closed and self._least > 1

    @property
    def are_read_rightly(self) -> bool:
        """True if llguidance needs no help: no optional property, or none or one of a closed object's."""
        if self._is_refused or not self._optional or (self._least == 0 and self._most is None):
            return True
        if self._most is not None and self._most < 0:
            return True  # nothing satisfies it
        if self._is_closed and self._least > len(self._optional):
            return True  # the same
        return self._is_closed and self._least <= 1 and self._most in {None, 1}

    def alternatives(self) -> Iterator[dict[str, object]]:
        """Objects of which a value has to be one."""
        count = len(self._optional)
        most = count if self._most is None else min(self._most, count)
        if not self._is_closed:
            for names in self._subsets(0, most):
                forbidden = dict.fromkeys(set(self._optional) - set(names), False)
                yield self._alternative(names, {**self._properties, **forbidden}, is_counted=True)
        elif most == count:
            for names in self._subsets(self._least, self._least):
                yield self._alternative(names, self._properties)
        elif self._least == 0:
            for names in self._subsets(most, most):
                yield self._alternative((), self._only(names))
        else:
            for names in self._subsets(self._least, most):
                yield self._alternative(names, self._only(names))

    def _subsets(self, least: int, most: int) -> Iterator[Sequence[str]]:
        for size in range(least, most + 1):
            yield from itertools.combinations(self._optional, size)

    def _only(self, names: Sequence[str]) -> dict[str, object]:
        wanted = {*names, *self._required}
        return {name: one for name, one in self._properties.items() if name in wanted}

    def _alternative(
        self, names: Sequence[str], properties: Schema, *, is_counted: bool = False
    ) -> dict[str, object]:
        counts = () if is_counted else ("minProperties", "maxProperties")
        inner = {
            key: value
            for key, value in self._schema.items()
            if key not in {*_KEPT_OUTSIDE, *counts}
        }
        return {**inner, "properties": dict(properties), "required": [*self._required, *names]}


def _references(schema: object) -> list[str]:
    references = (one.get("$ref") for one in objects_in(schema))
    return [one for one in references if isinstance(one, str)]


def _is_close(bound: float, other: float | None, is_part: bool) -> bool:  # noqa: FBT001
    """Tell whether llguidance takes an exclusive bound itself, beside the other bound or an unseen one."""
    if not bound.is_integer() or abs(bound) >= 10 ** (_FLOAT_DIGITS - 1):
        return False
    return is_part if other is None else abs(other - bound) < 1


def _without_nul(pattern: str) -> str:
    """Take U+0000 out of negated classes: grammars cannot spell it.

    A class that holds it lets every escape through, those of characters that it excludes among them.
    """

    def replaced(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        # In front a hyphen or a closing bracket stands for itself; behind another character it does not.
        return r"[^\x00" + (f"\\{found[1]}" if found[1] else "")

    return _NEGATED_CLASS.sub(replaced, pattern)


def _number(schema: Schema, key: str) -> float | None:
    value = schema.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _count(schema: Schema, key: str) -> int | None:
    value = _number(schema, key)
    return int(value) if value is not None and math.isfinite(value) else None


def _last_digit(bound: float) -> float:
    """The place of the last digit that a float of this size keeps for sure."""
    return float(10.0 ** (len(str(int(abs(bound)))) - _FLOAT_DIGITS))
