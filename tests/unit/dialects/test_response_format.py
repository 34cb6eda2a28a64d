"""Every way to ask for a shape becomes one constraint, and two of them are one too many."""

from __future__ import annotations

import json
from typing import Any

import pytest

from machd.dialects.completions.request import CompletionRequest
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.schema_bounds import read_choices

_SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}

_SHAPES: dict[str, tuple[Any, ConstraintKind, str]] = {
    "response_format": ({"type": "json_object"}, ConstraintKind.JSON_OBJECT, "response_format"),
    "guided_json": (_SCHEMA, ConstraintKind.JSON_SCHEMA, "guided_json"),
    "guided_regex": ("a+", ConstraintKind.REGEX, "guided_regex"),
    "guided_choice": (["a", "b"], ConstraintKind.CHOICE, "guided_choice"),
    "guided_grammar": ("root ::= x", ConstraintKind.GRAMMAR, "guided_grammar"),
    "structured_outputs": ({"regex": "b"}, ConstraintKind.REGEX, "structured_outputs.regex"),
    "grammar": ('root ::= "y"', ConstraintKind.GRAMMAR, "grammar"),
    "json_schema": ({"type": "string"}, ConstraintKind.JSON_SCHEMA, "json_schema"),
    "format": ({"type": "array"}, ConstraintKind.JSON_SCHEMA, "format"),
    "bad_words": (["x"], ConstraintKind.FORBIDDEN, "bad_words"),
}


def _constraint(**fields: object) -> Constraint | None:
    body = json.dumps({"model": "m", "prompt": "p", **fields}, ensure_ascii=False).encode()
    return decode_body(body, CompletionRequest).checked().constraint()


@pytest.mark.parametrize("name", _SHAPES)
def test_each_field_is_a_constraint_of_its_kind(name: str) -> None:
    """The kind follows from the field, and errors about it will name the field."""
    value, kind, param = _SHAPES[name]
    constraint = _constraint(**{name: value})
    assert constraint is not None
    assert (constraint.kind, constraint.param) == (kind, param)


_SAME_SCHEMA = {"required": ["a"], "type": "object"}


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": _SAME_SCHEMA, "structured_outputs": {"json": _SAME_SCHEMA}},
        {"guided_json": json.dumps(_SAME_SCHEMA, indent=4), "json_schema": _SAME_SCHEMA},
        {"guided_regex": "a+", "structured_outputs": {"regex": "a+"}},
        {"guided_choice": ["a", "b"], "structured_outputs": {"choice": ["a", "b"]}},
        {"guided_grammar": 'start: "a"', "grammar": 'start: "a"'},
        {"response_format": {"type": "json_object"}, "format": "json"},
        {
            "response_format": {"type": "json_schema", "schema": _SAME_SCHEMA},
            "format": {"type": "object", "required": ["a"]},
        },
    ],
)
def test_same_shape_said_twice_is_one(fields: dict[str, object]) -> None:
    """Fields of equal content are no conflict; errors name the first of them."""
    constraint = _constraint(**fields)
    assert constraint is not None
    assert constraint.param.split(".")[0] in fields


@pytest.mark.parametrize(
    ("format_", "param"),
    [
        ({"type": "json_object", "schema": _SAME_SCHEMA}, "response_format.schema"),
        ({"type": "json_schema", "schema": _SAME_SCHEMA}, "response_format.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": _SAME_SCHEMA}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "any name!", "schema": _SAME_SCHEMA}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_schema_is_taken_where_other_servers_take_it(format_: object, param: str) -> None:
    """llama.cpp's places for a schema count, and a name may be missing or of any form."""
    constraint = _constraint(response_format=format_)
    assert constraint is not None
    assert (constraint.kind, constraint.param) == (ConstraintKind.JSON_SCHEMA, param)
    assert json.loads(constraint.source) == _SAME_SCHEMA


@pytest.mark.parametrize("first", _SHAPES)
@pytest.mark.parametrize("second", _SHAPES)
def test_two_shapes_are_refused_by_both_names(first: str, second: str) -> None:
    """Any two of them are a 400 that names them both."""
    if first >= second:
        return
    with pytest.raises(InvalidRequestError) as caught:
        _constraint(**{first: _SHAPES[first][0], second: _SHAPES[second][0]})
    assert _SHAPES[first][2] in caught.value.message
    assert _SHAPES[second][2] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "n",
                        "description": "d",
                        "schema": _SCHEMA,
                        "strict": False,
                    },
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"guided_json": _SCHEMA}, "guided_json"),
        ({"guided_json": json.dumps(_SCHEMA)}, "guided_json"),
        ({"structured_outputs": {"json": _SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(_SCHEMA)}}, "structured_outputs.json"),
    ],
)
def test_a_schema_stays_the_text_that_it_was(fields: dict[str, object], param: str) -> None:
    """Object or text, in any field: the compiler gets the client's own JSON."""
    constraint = _constraint(**fields)
    assert constraint is not None
    assert constraint.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(constraint.source) == _SCHEMA
    assert constraint.param == param


def test_keys_of_a_schema_keep_their_order() -> None:
    """The order of properties is that of the answer, so it must not be lost on the way."""
    source = '{"properties": {"z": {}, "a": {}, "m": {}}}'
    constraint = _constraint(guided_json=json.loads(source))
    assert constraint is not None
    assert constraint.source == source


def test_choices_are_a_json_array() -> None:
    """Whatever they hold, they can be told apart again."""
    choices = ['a"b', "c\n", "é"]
    for fields in ({"guided_choice": choices}, {"structured_outputs": {"choice": choices}}):
        constraint = _constraint(**fields)
        assert constraint is not None
        assert json.loads(constraint.source) == choices


def test_as_many_choices_are_taken_as_the_page_says() -> None:
    """4,096 choices are decoded and pass the bounds of a constraint, one more is refused."""
    choices = [f"choice {number}" for number in range(4096)]
    constraint = _constraint(guided_choice=choices)
    assert constraint is not None
    assert read_choices(constraint) == choices
    with pytest.raises(InvalidRequestError) as caught:
        _constraint(guided_choice=[*choices, "one more"])
    assert caught.value.param == "guided_choice"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"guided_json": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"guided_decoding_backend": "outlines"},
        {"response_format": {"type": "text"}, "ignore_eos": True},
    ],
)
def test_no_shape_is_no_constraint(fields: dict[str, object]) -> None:
    """Any text is what a request gets that asks for nothing."""
    assert _constraint(**fields) is None


def test_any_object_may_be_asked_for_in_vllm_s_way() -> None:
    """``structured_outputs.json_object`` is ``response_format`` of type ``json_object``."""
    constraint = _constraint(structured_outputs={"json_object": True})
    assert constraint == Constraint(
        ConstraintKind.JSON_OBJECT, "", "structured_outputs.json_object"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 1}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": 1}},
            "response_format.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": [1]}}, "response_format.schema"),
        ({"format": "yaml"}, "format"),
        ({"json_schema": 7}, "json_schema"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"grammar": 'root ::= "a"', "min_tokens": 2}, "min_tokens"),
        ({"grammar": 'root ::= "a"', "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"guided_json": []}, "guided_json"),
        ({"guided_json": "no"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
    ],
)
def test_what_is_no_shape_is_refused_with_its_place(fields: dict[str, object], param: str) -> None:
    """A schema that is no object, or a list without a text, is a 400."""
    with pytest.raises(InvalidRequestError) as caught:
        _constraint(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["structural_tag", "whitespace_pattern"])
def test_what_is_not_done_is_refused_by_name(name: str) -> None:
    """A field of vLLM's that would change the answer is not ignored."""
    with pytest.raises(UnsupportedParameterError) as caught:
        _constraint(structured_outputs={"regex": "a", name: "x"})
    assert caught.value.param == f"structured_outputs.{name}"
