"""Schemas as they are rewritten for the compiler, and the keywords that are given up."""

from __future__ import annotations

import copy
import json
import random

import pytest

from machd.request.bounded_schema import bounded_schema
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.expressible_schema import expressible_schema
from machd.request.intersections import has_unbounded_cost

_CLOSED: dict[str, object] = {"type": "object", "additionalProperties": False}


def _optional(count: int) -> dict[str, object]:
    return {f"p{index}": {"type": "integer"} for index in range(count)}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "number", "exclusiveMinimum": 0.25, "maximum": 0.5},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "string", "pattern": r"^[a-z]\[^$"},
        {**_CLOSED, "properties": _optional(3), "minProperties": 1},
        {**_CLOSED, "properties": _optional(3), "maxProperties": 1},
        {**_CLOSED, "properties": _optional(3), "required": ["p0", "p1", "p2"], "maxProperties": 3},
        {"const": {"pattern": "[^a]", "exclusiveMinimum": 0, "maximum": 0.5}},
        {"enum": [{"type": "object", "properties": _optional(3), "minProperties": 2}]},
    ],
    ids=json.dumps,
)
def test_schema_that_is_read_rightly_stays_as_it_is(schema: dict[str, object]) -> None:
    """Only what llguidance reads wrongly is touched, and constants never."""
    assert expressible_schema(schema) == (schema, frozenset())


def test_given_schema_is_not_changed() -> None:
    """The client's schema is what its answer is held against elsewhere."""
    schema = {**_CLOSED, "properties": {"a": {"pattern": "[^a]"}, "b": {}}, "minProperties": 2}
    before = copy.deepcopy(schema)
    expressible_schema(schema)
    assert schema == before


@pytest.mark.parametrize(
    ("pattern", "rewritten"),
    [
        ("[^a]", r"[^\x00a]"),
        ("[^-a]", r"[^\x00\-a]"),
        ('^[^]"]+$', r'^[^\x00\]"]+$'),
        ("[^][]", r"[^\x00\][]"),
        (r"\[^a]", r"\[^a]"),
        (r"\\[^a][^b]", r"\\[^\x00a][^\x00b]"),
    ],
)
def test_negated_class_leaves_out_what_json_cannot_spell_here(pattern: str, rewritten: str) -> None:
    """A bracket that is escaped opens no class."""
    schema, _ = expressible_schema({"pattern": pattern, "patternProperties": {pattern: {}}})
    assert schema == {"pattern": rewritten, "patternProperties": {rewritten: {}}}


def test_strict_bound_moves_by_the_last_digit_of_a_float() -> None:
    """Whatever the size of the number, up to where floats have no place behind the point."""
    for bound, moved in ((0, 1e-14), (3, 3 + 1e-14), (1000, 1000 + 1e-11), (10**14, None)):
        schema, _ = expressible_schema({"exclusiveMinimum": bound, "maximum": bound + 0.5})
        assert schema.get("minimum") == moved
    schema, _ = expressible_schema({"minimum": -0.5, "exclusiveMaximum": 0})
    assert schema == {"minimum": -0.5, "maximum": -1e-14}


@pytest.mark.parametrize(
    "schema",
    [
        {**_CLOSED, "properties": _optional(30), "minProperties": 10, "maxProperties": 20},
        {"type": "object", "properties": _optional(9), "patternProperties": {"^x": {}}, "minProperties": 1, "maxProperties": 5},
        {"allOf": [{"type": "object", "properties": _optional(3), "maxProperties": 2}, {"required": ["x"]}]},
        {"$ref": "#/properties/p0", **_CLOSED, "properties": _optional(3), "maxProperties": 2},
    ],
    ids=["many", "many of an open object", "a part of an intersection", "a reference inside"],
)  # fmt: skip
def test_count_that_cannot_be_written_out_is_named(schema: dict[str, object]) -> None:
    """It is left out, so that no schema is refused for it, and the client is told."""
    rewritten, ignored = expressible_schema(schema)
    assert ignored
    assert ignored <= {"minProperties", "maxProperties"}
    assert not any(f'"{one}"' in json.dumps(rewritten) for one in ignored)


def test_objects_that_become_choices_share_one_bound() -> None:
    """A hundred small ones, each within the bound, would make a schema of a megabyte."""
    one = {**_CLOSED, "properties": _optional(8), "maxProperties": 3}
    many = {"type": "object", "properties": {f"o{index}": one for index in range(100)}}
    rewritten, ignored = expressible_schema(many)
    assert ignored == {"maxProperties"}
    assert len(json.dumps(rewritten)) < 150_000


def test_count_of_names_that_may_come_twice_is_named() -> None:
    """A grammar counts names, and a name that is not listed may come twice."""
    schema: dict[str, object] = {"type": "object", "minProperties": 2}
    assert expressible_schema(schema) == (schema, frozenset({"minProperties"}))


def test_definitions_stay_where_references_find_them() -> None:
    """An object that becomes a choice keeps its definitions outside of it."""
    schema = {
        **_CLOSED,
        "properties": {name: {"$ref": "#/$defs/d"} for name in "abc"},
        "minProperties": 2,
        "$defs": {"d": {"type": "integer"}},
    }
    rewritten, ignored = expressible_schema(schema)
    assert not ignored
    assert rewritten["$defs"] == {"d": {"type": "integer"}}
    alternatives = rewritten["anyOf"]
    assert isinstance(alternatives, list)
    assert [one["required"] for one in alternatives] == [["a", "b"], ["a", "c"], ["b", "c"]]


def test_anything_may_stand_under_any_keyword() -> None:
    """What is no schema is left for the compiler to refuse."""
    keywords = (
        "type", "properties", "required", "patternProperties", "additionalProperties", "pattern", "items",
        "minProperties", "maxProperties", "minimum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
        "anyOf", "allOf", "$ref", "$defs",
    )  # fmt: skip
    values: tuple[object, ...] = (
        None, True, -3.5, 0, 2, 10**400, 1e300, "", "object", "number", "[^", "#/$defs/a", [], [[]], [{}], ["a"],
        {}, {"a": 1}, {"a": {}}, {"a": {"type": "integer"}, "b": {}}, {"(": {}},
    )  # fmt: skip
    rng = random.Random(1)
    for _ in range(3000):
        chosen = rng.sample(keywords, rng.randrange(1, 7))
        schema = {keyword: rng.choice(values) for keyword in chosen}
        source = json.dumps(schema)
        expressible_schema(bounded_schema(schema))
        has_unbounded_cost(Constraint(ConstraintKind.JSON_SCHEMA, source, "p"))
