"""Constraints that get a process of their own, and usual ones that do not."""

from __future__ import annotations

import json

import pytest

from machd.request.constraint import Constraint, ConstraintKind
from machd.request.intersections import has_unbounded_cost

_STRING = {"type": "string"}

_UNBOUNDED: list[dict[str, object]] = [
    {"allOf": [_STRING, {"pattern": "a"}]},
    {"properties": {"a": {"items": {"allOf": [{"pattern": "a"}, {"pattern": "b"}]}}}},
    {"$ref": "#/$defs/a", "pattern": "b", "$defs": {"a": {"pattern": "a"}}},
    {"anyOf": [{"pattern": "a"}, {"pattern": "b"}], "pattern": "c"},
    {"oneOf": [{"pattern": "a"}], "anyOf": [{"pattern": "b"}]},
    {"type": "string", "pattern": "a", "format": "uri"},
    {"patternProperties": {"a": {}, "b": {}}},
    {"patternProperties": {"a": {"pattern": "x"}}, "properties": {"a": {"pattern": "y"}}},
    {"type": "number", "multipleOf": 1_000_003},
    {"type": "number", "multipleOf": 0.99991},
    {"type": "integer", "multipleOf": 1e12},
]

_USUAL: list[dict[str, object]] = [
    {"type": "object", "properties": {"a": _STRING}, "required": ["a"], "title": "x"},
    {"allOf": [{"$ref": "#/$defs/a"}], "description": "x", "$defs": {"a": _STRING}},
    {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "default": None, "$defs": {"a": _STRING}},
    {"type": "string", "pattern": "a", "minLength": 1, "maxLength": 9},
    {"type": "number", "minimum": 0, "multipleOf": 0.01},
    {"type": "integer", "multipleOf": 1000},
    {"type": "object", "patternProperties": {"^x": _STRING}},
]


def _schema(schema: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), "p")


def _call(schema: object) -> Constraint:
    source = f'%llguidance {{}}\nstart: "x" a\na: %json {json.dumps(schema)}\n'
    return Constraint(ConstraintKind.CALLS, source, "tools")


@pytest.mark.parametrize("schema", _UNBOUNDED, ids=json.dumps)
def test_schema_that_may_explode_is_seen(schema: dict[str, object]) -> None:
    """However deep it lies, and among the tools' schemas, too."""
    assert has_unbounded_cost(_schema(schema))
    assert has_unbounded_cost(_call({"properties": {"a": schema}}))


@pytest.mark.parametrize("schema", _USUAL, ids=json.dumps)
def test_usual_schema_needs_no_process(schema: dict[str, object]) -> None:
    """As libraries write them from classes."""
    assert not has_unbounded_cost(_schema(schema))
    assert not has_unbounded_cost(_call(schema))


@pytest.mark.parametrize(
    ("kind", "source", "is_unbounded"),
    [
        (ConstraintKind.GRAMMAR, 'start: A & B\nA: "a"\nB: "b"', True),
        (ConstraintKind.GRAMMAR, 'start: ~A\nA: "a"', True),
        (ConstraintKind.GRAMMAR, 'start: %json {"allOf": []}', True),
        (ConstraintKind.GRAMMAR, 'start: "a"+ | /[b-d]{2,9}/', False),
        (ConstraintKind.REGEX, "(a|b){1,1000}", False),
        (ConstraintKind.CHOICE, '["a", "b"]', False),
        (ConstraintKind.JSON_OBJECT, "", False),
        (ConstraintKind.FORBIDDEN, '["a"]', False),
        (ConstraintKind.FORBIDDEN, json.dumps(["a" * 99] * 99), True),
    ],
)
def test_other_constraint_is_judged_by_its_text(
    kind: ConstraintKind, source: str, *, is_unbounded: bool
) -> None:
    """Operators of Lark, and lists of texts that are long."""
    assert has_unbounded_cost(Constraint(kind, source, "p")) is is_unbounded


def test_a_choice_that_spells_a_schema_is_a_choice() -> None:
    """In a literal of a grammar that machd writes the mark of a schema is a client's text."""
    source = 'start: answer | calls\nanswer: "printf %json x" | "no"\ncalls: "x"'
    assert not has_unbounded_cost(Constraint(ConstraintKind.CALLS, source, "p"))
    unbounded = json.dumps({"allOf": [{"pattern": "a"}, {"pattern": "b"}]})
    source = f"start: arguments_0\narguments_0: %json {unbounded}"
    assert has_unbounded_cost(Constraint(ConstraintKind.CALLS, source, "p"))
