"""Which objects of a schema are closed, and which integers get bounds."""

from __future__ import annotations

from typing import Any

import pytest

from machd.request.bounded_schema import bounded_schema

_A: dict[str, Any] = {"properties": {"a": {}}}
_B: dict[str, Any] = {"properties": {"b": {}}}


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        pytest.param(_A, _closed(_A), id="properties"),
        pytest.param({"properties": {}}, _closed({"properties": {}}), id="no property at all"),
        pytest.param(
            {"properties": {"a": {"type": "array", "items": _B}}},
            _closed({"properties": {"a": {"type": "array", "items": _closed(_B)}}}),
            id="inside of items",
        ),
        pytest.param({"anyOf": [_A, _B]}, {"anyOf": [_closed(_A), _closed(_B)]}, id="any of"),
        pytest.param({"allOf": [_A]}, {"allOf": [_closed(_A)]}, id="all of one"),
        pytest.param(
            {"$ref": "#/$defs/A", "description": "x", "$defs": {"A": _A}},
            {"$ref": "#/$defs/A", "description": "x", "$defs": {"A": _closed(_A)}},
            id="a definition",
        ),
        pytest.param(
            {"properties": {"properties": _A}},
            _closed({"properties": {"properties": _closed(_A)}}),
            id="a property named properties",
        ),
        pytest.param(
            {"patternProperties": {"^a": {}}},
            _closed({"patternProperties": {"^a": {}}}),
            id="pattern properties",
        ),
    ],
)
def test_object_is_closed_when_it_names_its_keys(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    """An object that names keys and is silent about others holds no others."""
    assert bounded_schema(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"type": "object"}, id="no keys named"),
        pytest.param({**_A, "additionalProperties": True}, id="opened by true"),
        pytest.param({**_A, "additionalProperties": {"type": "string"}}, id="opened by a schema"),
        pytest.param({**_A, "unevaluatedProperties": False}, id="its own rule"),
        pytest.param({**_A, "required": ["z"]}, id="requires a key that it does not name"),
        pytest.param({**_A, "minProperties": 2}, id="needs more keys than it names"),
        pytest.param({"allOf": [_A, _B]}, id="all of two"),
        pytest.param({**_A, "allOf": [_B]}, id="properties beside all of"),
        pytest.param({**_A, "oneOf": [_B]}, id="properties beside one of"),
        pytest.param({"allOf": [{"anyOf": [_A, _B]}, {"type": "object"}]}, id="inside of all of"),
        pytest.param(
            {**_A, "$ref": "#/$defs/B", "$defs": {"B": _B}}, id="properties beside a reference"
        ),
        pytest.param(
            {
                "allOf": [{"$ref": "#/$defs/A"}, _B],
                "$defs": {"A": {"$ref": "#/$defs/C"}, "C": _A},
            },
            id="a reference to a reference in all of",
        ),
        pytest.param(
            {"allOf": [{"$ref": "#/properties/a~1b"}, _A], "type": "object"}, id="nowhere"
        ),
        pytest.param({"not": _A}, id="what must not be"),
        pytest.param(
            {"properties": 7, "required": "x", "anyOf": 3, "allOf": [True]}, id="nonsense"
        ),
    ],
)
def test_object_stays_open_when_closing_would_change_more(schema: dict[str, Any]) -> None:
    """An object stays open where keys may come from elsewhere, or where the schema says so."""
    assert bounded_schema(schema) == schema


def test_target_of_an_intersection_stays_open_everywhere() -> None:
    """A definition that one place uses in an intersection is open in every place."""
    schema = {
        "properties": {
            "plain": {"$ref": "#/$defs/A"},
            "both": {"allOf": [{"$ref": "#/$defs/A"}, _B]},
        },
        "$defs": {"A": _A, "C": _A | {"title": "C"}},
    }
    closed = bounded_schema(schema)
    assert closed["$defs"] == {"A": _A, "C": _closed(_A | {"title": "C"})}
    assert closed["additionalProperties"] is False


def test_recursive_schema_comes_to_an_end() -> None:
    """A schema that refers to itself, alone and in an intersection, is walked once."""
    tree = {"properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    assert bounded_schema(tree) == _closed(tree)
    loop = {"allOf": [{"$ref": "#"}, _A]}
    assert bounded_schema(loop) == loop


_INT64 = {"minimum": -(2**63) + 1024, "maximum": 2**63 - 1024}


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({"type": "integer"}, _INT64),
        ({"type": ["integer", "null"]}, _INT64),
        ({"type": "integer", "minimum": 0}, {"minimum": 0, "maximum": _INT64["maximum"]}),
        ({"type": "integer", "exclusiveMaximum": 5}, {"minimum": _INT64["minimum"]}),
        ({"type": "integer", "minimum": 1, "maximum": 3}, {"minimum": 1, "maximum": 3}),
        ({"type": "number"}, {}),
        ({"type": ["integer", "number"]}, {}),
        ({"type": "string"}, {}),
    ],
)
def test_integer_gets_the_bounds_that_it_lacks(
    schema: dict[str, Any], bounds: dict[str, Any]
) -> None:
    """An integer has the bounds of 64 bits where it names none; inside of an object, too."""
    assert bounded_schema(schema) == schema | bounds
    inside = bounded_schema({"properties": {"a": schema}})
    assert inside["properties"] == {"a": schema | bounds}
