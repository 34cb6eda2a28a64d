"""Schemas of the supported subset, instances on both sides of each, and what is refused.

In the manner of JSON-Schema-Test-Suite, draft 2020-12, written for this project: instances are
Python values, and text is made of them as the grammar spells JSON. ``jsonschema`` is the judge.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.validators import extend

Json = Any
"""Whatever JSON can say."""


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """A schema and instances that it takes and does not take.

    Attributes:
        schema: Of the supported subset.
        valid: Instances that have to be possible answers.
        invalid: Instances that must not be.
        invalid_texts: Text that must not be an answer either, as it stands.
    """

    name: str
    schema: dict[str, Json]
    valid: tuple[Json, ...] = ()
    invalid: tuple[Json, ...] = ()
    invalid_texts: tuple[str, ...] = ()


def spelled_json(instance: Json) -> str:
    """An instance as grammars spell it."""
    return json.dumps(instance, ensure_ascii=False)


def is_valid(text: str, schema: Json) -> bool:
    """Return whether ``jsonschema`` takes a text as JSON of a schema, formats and decimals included.

    Raises:
        ValueError: The text is no JSON.
    """
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    instance = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    return bool(_Validator(exact, format_checker=_FORMATS).is_valid(instance))


def _no_constant(_name: str) -> None:
    raise ValueError("NaN and Infinity are no JSON")


def _is_integer(_checker: object, instance: Json) -> bool:
    if isinstance(instance, Decimal):
        return instance == instance.to_integral_value()
    return isinstance(instance, int) and not isinstance(instance, bool)


def _multiple_of(
    _validator: object, factor: Json, instance: Json, _schema: object
) -> Iterator[ValidationError]:
    """The keyword without a float's or a decimal's limits."""
    is_number = isinstance(instance, int | Decimal) and not isinstance(instance, bool)
    if is_number and Fraction(instance) % Fraction(factor):
        yield ValidationError("not a multiple")


_Validator = extend(
    Draft202012Validator,
    {"multipleOf": _multiple_of},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)
_FORMATS = FormatChecker(formats=["date", "email", "ipv4", "ipv6", "uuid"])

_TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    re.ASCII | re.IGNORECASE,
)
_HOST_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII | re.IGNORECASE)
_URI = re.compile(r"[a-z][a-z0-9+.-]*:[!-~]*", re.ASCII | re.IGNORECASE)


def _is_time(instance: object) -> bool:
    return not isinstance(instance, str) or _TIME.fullmatch(instance) is not None


def _is_date_time(instance: object) -> bool:
    if not isinstance(instance, str):
        return True
    dt.date.fromisoformat(instance[:10])
    return instance[10:11] in ("T", "t") and _TIME.fullmatch(instance[11:]) is not None


def _is_host(instance: object) -> bool:
    if not isinstance(instance, str):
        return True
    return len(instance) <= 253 and all(map(_HOST_LABEL.fullmatch, instance.split(".")))


def _is_uri(instance: object) -> bool:
    return not isinstance(instance, str) or _URI.fullmatch(instance) is not None


_FORMATS.checks("time")(_is_time)
_FORMATS.checks("date-time", raises=ValueError)(_is_date_time)
_FORMATS.checks("hostname")(_is_host)
_FORMATS.checks("uri")(_is_uri)

_OF_EACH_TYPE: dict[str, Json] = {
    "null": None,
    "boolean": True,
    "integer": 7,
    "string": "x",
    "array": [1],
    "object": {"a": 1},
}


def _type_case(name: str, *also: str) -> SchemaCase:
    names = (name, *also)
    others = tuple(one for key, one in _OF_EACH_TYPE.items() if key not in names)
    return SchemaCase(f"type {name}", {"type": name}, (_OF_EACH_TYPE[name],), others)


_TYPES = (
    *(_type_case(name) for name in _OF_EACH_TYPE),
    SchemaCase(
        "type number", {"type": "number"}, (0, -1, 0.5, 1e30, -2.5e-7), ("1", None, True, [], {})
    ),
    SchemaCase(
        "several types", {"type": ["string", "null"], "maxLength": 2}, ("", "ab", None), ("abc", 1)
    ),
    SchemaCase("an integer is no fraction", {"type": "integer"}, (0, -12, 10**18), (0.5, "1")),
    SchemaCase("anything", {}, (None, True, 1, 0.5, "é😀", [1, {"a": []}], {"a": {"b": None}})),
    SchemaCase(
        "JSON alone is JSON",
        {"type": ["object", "number", "string"]},
        invalid_texts=("{", '{"a": }', "01", "+1", ".5", "1.", "NaN", "Infinity", "'a'", '"\n"'),
    ),
)

_VALUES = (
    SchemaCase(
        "enum", {"enum": ["a", 1, None, {"b": [1]}]}, ("a", 1, None, {"b": [1]}), ("b", 2, {}, [])
    ),
    SchemaCase("enum beside a type", {"type": "string", "enum": ["a", 1]}, ("a",), (1, "b")),
    SchemaCase("enum beside a bound", {"enum": [1, 5], "minimum": 3}, (5,), (1, 3)),
    SchemaCase("const", {"const": "é\n"}, ("é\n",), ("é", "")),
    SchemaCase("const with what has to be escaped", {"const": '"\\\t/'}, ('"\\\t/',), ('"\\/', "")),
    SchemaCase("const object", {"const": {"a": [1, None]}}, ({"a": [1, None]},), ({"a": [1]}, {})),
    SchemaCase("const false", {"const": False}, (False,), (0, None, True)),
)

_CLOSED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}

_OBJECTS = (
    SchemaCase(
        "minProperties of some optional ones",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {}},
            "minProperties": 2,
        },
        ({"a": 1, "b": 2}, {"b": 1, "c": None}, {"a": 1, "b": 2, "c": 3}),
        ({}, {"a": 1}, {"c": 1}),
    ),
    SchemaCase(
        "maxProperties of some optional ones",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {}},
            "maxProperties": 2,
        },
        ({}, {"b": 1}, {"a": 1, "c": 2}),
        ({"a": 1, "b": 2, "c": 3},),
    ),
    SchemaCase(
        "between two counts of optional ones",
        {
            "type": "object",
            "properties": {name: {"type": "integer"} for name in "abcd"},
            "required": ["b"],
            "minProperties": 2,
            "maxProperties": 3,
        },
        ({"a": 1, "b": 2}, {"b": 1, "c": 2, "d": 3}),
        ({"b": 1}, {"a": 1, "c": 1}, dict.fromkeys("abcd", 1)),
    ),
    SchemaCase(
        "maxProperties of optional ones and of names that fit a pattern",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "patternProperties": {"^x": {"type": "string"}},
            "maxProperties": 2,
        },
        ({}, {"a": 1}, {"a": 1, "x1": ""}, {"x1": "", "x2": ""}),
        ({"a": 1, "x1": "", "x2": ""}, {"x1": "", "x2": "", "x3": ""}),
    ),
    SchemaCase(
        "a required name that only a pattern knows",
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "required": ["x1"]},
        ({"x1": 1}, {"x1": 1, "x2": 2}),
        ({}, {"x2": 1}, {"x1": ""}),
    ),
    SchemaCase(
        "properties",
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}},
        ({}, {"a": 1}, {"a": 1, "b": None}),
        ({"a": "x"}, {"a": None, "b": 1}, []),
        ('{"\\u0061": "x"}', '{"a": 1, "a": "x"}', '{"a": 1, "\\u0061": "x"}'),
    ),
    SchemaCase(
        "a closed object",
        _CLOSED,
        ({"a": 1}, {"a": 1, "b": "x"}),
        ({}, {"b": "x"}, {"a": 1, "c": 1}, {"a": "1"}),
        ('{"\\u0061": 1}', '{"a": 1, "a": 2}', '{"a": 1,}'),
    ),
    SchemaCase(
        "additional properties of a type",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
        ({}, {"a": 1}, {"b": "x"}, {"a": 1, "b": "x", "aa": "y"}),
        ({"a": "x"}, {"b": 1}),
        ('{"\\u0061": "x"}',),
    ),
    SchemaCase(
        "required without properties",
        {"type": "object", "required": ["z"]},
        ({"z": 1}, {"z": None}),
        ({}, {"a": 1}),
    ),
    SchemaCase(
        "a property that must not be",
        {
            "type": "object",
            "properties": {"a": False, "b": {"type": "integer"}},
            "additionalProperties": False,
        },
        ({}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 1}),
    ),
    SchemaCase(
        "names that have to be escaped",
        {
            "type": "object",
            "properties": {'a"b\n': {"type": "integer"}, "é/~": {"type": "null"}},
            "required": ['a"b\n', "é/~"],
            "additionalProperties": False,
        },
        ({'a"b\n': 1, "é/~": None},),
        ({'a"b\n': 1}, {"é/~": None}),
    ),
    SchemaCase(
        "patternProperties",
        {
            "type": "object",
            "properties": {"id": {"type": "string"}},
            "patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string"}},
            "additionalProperties": False,
        },
        ({}, {"id": "x"}, {"id": "x", "n_1": 1, "s_1": "y"}),
        ({"n_1": "x"}, {"s_1": 1}, {"other": 1}, {"id": 1}),
        ('{"\\u006e_1": "x"}',),
    ),
    SchemaCase(
        "a name that fits a pattern too",
        {
            "type": "object",
            "properties": {"b1": {"minimum": 2}},
            "patternProperties": {"^b": {"type": "integer"}},
            "additionalProperties": False,
        },
        ({"b1": 3}, {"b2": 1}),
        ({"b1": 1}, {"b1": "x"}, {"b2": "x"}, {"c": 1}),
    ),
    SchemaCase(
        "minProperties of known ones",
        {**_CLOSED, "required": [], "minProperties": 1},
        ({"a": 1}, {"b": "x"}, {"a": 1, "b": "x"}),
        ({},),
    ),
    SchemaCase(
        "maxProperties",
        {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 1},
        ({}, {"a": 1}),
        ({"a": 1, "b": 2}, {"a": "x"}),
    ),
    SchemaCase(
        "objects in objects",
        {
            "type": "object",
            "properties": {"inner": {"type": "object", "properties": {"list": {"type": "array"}}}},
            "required": ["inner"],
        },
        ({"inner": {}}, {"inner": {"list": [1, [2]]}}),
        ({}, {"inner": []}, {"inner": {"list": {}}}),
    ),
)

_ARRAYS = (
    SchemaCase(
        "items",
        {"type": "array", "items": {"type": "integer"}},
        ([], [1], [1, 2, 3]),
        (["a"], [1, "a"], {}, None),
        ("[1,]", "[,1]"),
    ),
    SchemaCase("no items", {"type": "array", "items": False}, ([],), ([1], [None])),
    SchemaCase(
        "prefixItems",
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        ([], [1], [1, "a"], [1, "a", None]),
        (["a"], [1, 2]),
    ),
    SchemaCase(
        "prefixItems and no more",
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "items": False,
            "minItems": 2,
        },
        ([1, "a"],),
        ([], [1], [1, "a", 1]),
    ),
    SchemaCase(
        "minItems and maxItems",
        {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3},
        ([1], [1, 2], [2, 2, 2]),
        ([], [1, 1, 1, 1], [3]),
    ),
    SchemaCase(
        "arrays in arrays",
        {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        ([], [[]], [[True], [False, True]]),
        ([True], [[True, True, True]]),
    ),
    SchemaCase(
        "items that another schema bounds, too",
        {
            "allOf": [
                {"type": "array", "items": {"type": "integer"}},
                {"prefixItems": [{"minimum": 3}]},
            ]
        },
        ([], [3], [3, 1]),
        ([1], ["a"]),
    ),
)

_STRINGS = (
    SchemaCase(
        "a class without quotes",
        {"type": "string", "pattern": '^[^"]{1,3}$'},
        ("ab", "\\", "\n", "é"),
        ('"', 'a"', "abcd", ""),
    ),
    SchemaCase(
        "a class without backslashes, quotes, and a dash in front",
        {"type": "string", "pattern": '^[^-,\\\\"]{1,3}$'},
        ("ab", "é!"),
        ("\\", '"', "a-", ","),
    ),
    SchemaCase(
        "lengths, in characters",
        {"type": "string", "minLength": 2, "maxLength": 3},
        ("ab", "éé", "😀😀", '"\\', "a\nb"),
        ("", "a", "😀", "abcd"),
        ('"\\ud83d\\ude00"', '"\\ud800a"'),
    ),
    SchemaCase("no characters", {"type": "string", "maxLength": 0}, ("",), ("a",)),
    SchemaCase(
        "no half of a pair, no raw control character",
        {"type": "string"},
        ("", "\n\t", "\u2028"),
        (1,),
        ('"\\ud800"', '"\\udc00"', '"a\nb"', '"\x00"', '"\\x"', '"'),
    ),
    SchemaCase(
        "pattern, whole",
        {"type": "string", "pattern": "^[a-z]{2}[0-9]$"},
        ("ab1",),
        ("ab", "ab12", "xab1", "AB1"),
        ('"ab1\\n"',),  # in Python alone ``$`` lets a line feed follow
    ),
    SchemaCase(
        "pattern, anywhere", {"type": "string", "pattern": "ab"}, ("ab", "xaby"), ("", "a", "ba")
    ),
    SchemaCase(
        "pattern, one alternative anchored",
        {"type": "string", "pattern": "a|^b$"},
        ("a", "xay", "b"),
        ("cb", "bb"),
    ),
    SchemaCase(
        "pattern of what has to be escaped",
        {"type": "string", "pattern": '^["\\\\\\n]+$'},
        ('"', "\\", '\n"\\'),
        ("a", ""),
    ),
    SchemaCase(
        "pattern and length",
        {"type": "string", "pattern": "^a+$", "minLength": 2, "maxLength": 3},
        ("aa", "aaa"),
        ("a", "aaaa", "ab"),
    ),
    SchemaCase(
        "two patterns",
        {"type": "string", "allOf": [{"pattern": "a"}, {"pattern": "b"}]},
        ("ab", "ba", "xbxax"),
        ("a", "b", ""),
    ),
)

_UUID = "123e4567-e89b-12d3-a456-426614174000"


def _format_case(name: str, valid: tuple[Json, ...], invalid: tuple[Json, ...]) -> SchemaCase:
    return SchemaCase(f"format {name}", {"type": "string", "format": name}, valid, (*invalid, 1))


_FORMAT_CASES = (
    _format_case(
        "date-time",
        ("2024-02-29T00:00:00Z", "1999-12-31T23:59:59.123+05:30"),
        ("2024-02-30T00:00:00Z", "2024-02-29", "2024-02-29T00:00:00", "2024-13-01T00:00:00Z", ""),
    ),
    _format_case("date", ("2024-02-29", "1999-12-31"), ("2023-02-30", "2023-04-31", "2023-4-1")),
    _format_case(
        "time", ("00:00:00Z", "23:59:59.5+01:00"), ("24:00:00Z", "00:00:00", "12:60:00Z", "12:00Z")
    ),
    SchemaCase(
        "format email",
        {"type": "string", "format": "email"},
        ("a@b.c", "first.last+tag@example.com"),
        ("a", "", 1),
        ('"a b@c.d"', '"a..b@c.d"', '"a@"'),  # of which jsonschema sees the @ alone
    ),
    _format_case("uuid", (_UUID, _UUID.upper()), (_UUID.replace("-", ""), _UUID[:-1], "")),
    _format_case("ipv4", ("1.2.3.4", "255.255.255.255"), ("256.1.1.1", "1.2.3", "01.2.3.4")),
    _format_case("ipv6", ("::1", "2001:db8:0:0:0:0:0:1"), ("1::2::3", "12345::", "1.2.3.4")),
    _format_case(
        "hostname", ("a", "a-b.example", "a." + "b" * 63), ("", "-a.b", "a_b", "a" * 64, "a.")
    ),
    _format_case(
        "uri", ("http://a.b/c?d=e#f", "urn:isbn:1", "http://[::1]/"), ("/x", "a b", "http://a b")
    ),
    SchemaCase(
        "format and pattern",
        {"type": "string", "format": "uuid", "pattern": "^a"},
        ("a" + _UUID[1:],),
        (_UUID, "a"),
    ),
)

_NUMBERS = (
    SchemaCase(
        "an integer's bounds",
        {"type": "integer", "minimum": -5, "maximum": 120},
        (-5, 0, 99, 120),
        (-6, 121, 1000, 0.5),
    ),
    SchemaCase(
        "an integer's bounds that are fractions",
        {"type": "integer", "minimum": 1.5, "maximum": 3.5},
        (2, 3),
        (1, 4),
    ),
    SchemaCase(
        "an integer strictly between",
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
        (1, 9),
        (0, 10, -1),
    ),
    SchemaCase(
        "a number's bounds",
        {"type": "number", "minimum": 0, "maximum": 1},
        (0, 1, 0.5, 0.001),
        (-0.001, 1.001, 2, -1),
        ("1e1",),
    ),
    SchemaCase(
        "a number strictly between",
        {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 2},
        (-0.4, 0, 1.99),
        (-0.5, 2, 2.5),
        ("-0.50", "2.0"),
    ),
    SchemaCase(
        "a number strictly above the integer that its upper bound begins with",
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        (0.25, 0.001),
        (0, 0.5),
        ("-0", "0.0", "0e0"),
    ),
    SchemaCase(
        "a number strictly below zero",
        {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
        (-0.25, -0.5),
        (0, -0.75),
        ("-0", "-0.0"),
    ),
    SchemaCase(
        "strict bounds of two schemas",
        {"allOf": [{"type": "number", "exclusiveMinimum": 3}, {"maximum": 3.5}]},
        (3.25, 3.5),
        (3, 4),
        ("3.0",),
    ),
    SchemaCase("a multiple", {"type": "integer", "multipleOf": 3}, (0, 3, -9, 12), (1, 4, -2)),
    SchemaCase(
        "a multiple within bounds",
        {"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 20},
        (5, 20),
        (0, 3, 7, 25),
    ),
    SchemaCase(
        "a multiple of a fraction",
        {"type": "number", "multipleOf": 0.01},
        (0, 1, 1.01, -1.1),
        (1.001, 0.005),
    ),
    SchemaCase(
        "a bound without a type", {"minimum": 3}, (3, 4.5, "x", None, [1]), (2, -3, 2.9), ("1e0",)
    ),
)

_COMBINED = (
    SchemaCase(
        "anyOf", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, (1, None), ("x", 0.5, [])
    ),
    SchemaCase(
        "anyOf beside other keywords",
        {"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": -5}]},
        (3, 100, -5),
        (0, 2, -4, "x"),
    ),
    SchemaCase(
        "anyOf that overlap",
        {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^a"}]},
        ("", "bb", "aaaa"),
        ("bbb",),
    ),
    SchemaCase(
        "allOf",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}},
                {"required": ["a", "b"]},
                {"properties": {"a": {"minimum": 3}, "b": {"type": "string"}}},
            ]
        },
        ({"a": 3, "b": "x"},),
        ({"a": 3}, {"a": 2, "b": "x"}, {"b": "x"}, {"a": 3, "b": 1}),
    ),
    SchemaCase(
        "allOf of bounds",
        {"type": "integer", "allOf": [{"minimum": 3}, {"maximum": 5}]},
        (3, 5),
        (2, 6),
    ),
    SchemaCase(
        "allOf beside a closed object",
        {**_CLOSED, "allOf": [{"properties": {"c": {"type": "integer"}}}]},
        ({"a": 1},),
        ({"a": 1, "c": 1}, {"c": 1}),
    ),
    SchemaCase(
        "allOf of a closed object and another",
        {
            "allOf": [
                {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
                {"type": "object", "properties": {"b": {"type": "integer"}}},
            ]
        },
        ({}, {"a": 1}),
        ({"b": 1}, {"a": 1, "b": 1}),
    ),
    SchemaCase(
        "anyOf beside a closed object",
        {**_CLOSED, "anyOf": [{"required": ["b"]}, {"properties": {"a": {"minimum": 5}}}]},
        ({"a": 1, "b": "x"}, {"a": 5}),
        ({"a": 1}, {"b": "x"}),
    ),
    SchemaCase(
        "oneOf of other types",
        {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
        ("a", 1, None),
        (0.5, [], True),
    ),
    SchemaCase("oneOf of values", {"oneOf": [{"const": "a"}, {"const": "b"}]}, ("a", "b"), ("c",)),
    SchemaCase(
        "oneOf by a tag",
        {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}},
                    "required": ["kind", "radius"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"kind": {"const": "square"}, "side": {"type": "number"}},
                    "required": ["kind", "side"],
                    "additionalProperties": False,
                },
            ]
        },
        ({"kind": "circle", "radius": 1}, {"kind": "square", "side": 0.5}),
        ({"kind": "circle", "side": 1}, {"kind": "square"}, {"kind": "line"}, {}),
    ),
)

_REFERENCES = (
    SchemaCase(
        "$ref into $defs",
        {
            "type": "array",
            "items": {"$ref": "#/$defs/small"},
            "$defs": {"small": {"type": "integer", "maximum": 9}},
        },
        ([], [1, 9]),
        ([10], ["a"]),
    ),
    SchemaCase(
        "$ref beside other keywords",
        {
            "$ref": "#/$defs/number",
            "maximum": 3,
            "$defs": {"number": {"type": "integer", "minimum": 1}},
        },
        (1, 3),
        (0, 4, "x"),
    ),
    SchemaCase(
        "$ref with escapes",
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}},
        (None,),
        (1,),
    ),
    SchemaCase(
        "$ref to an anchor",
        {"$ref": "#one", "$defs": {"a": {"$anchor": "one", "type": "boolean"}}},
        (True,),
        (1,),
    ),
    SchemaCase(
        "definitions, as they were called",
        {"$ref": "#/definitions/a", "definitions": {"a": {"type": "boolean"}}},
        (False,),
        ("x",),
    ),
    SchemaCase(
        "recursion by $defs",
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                    "required": ["value"],
                    "additionalProperties": False,
                }
            },
        },
        ({"value": 1}, {"value": 1, "next": {"value": 2, "next": {"value": 3}}}),
        ({}, {"value": 1, "next": {}}, {"value": 1, "next": None}),
    ),
    SchemaCase(
        "recursion to the root",
        {
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["children"],
            "additionalProperties": False,
        },
        ({"children": []}, {"children": [{"children": []}, {"children": [{"children": []}]}]}),
        ({}, {"children": [{}]}, {"children": [1]}),
    ),
)

_ANNOTATIONS = (
    SchemaCase(
        "annotations",
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$comment": "c",
            "title": "t",
            "description": "d",
            "default": "x",
            "examples": ["y"],
            "deprecated": True,
            "readOnly": True,
            "writeOnly": False,
            "contentEncoding": "base64",
            "contentMediaType": "text/plain",
            "type": "integer",
        },
        (1,),
        ("x", "y"),
    ),
)

SCHEMA_CASES: tuple[SchemaCase, ...] = (
    *_TYPES,
    *_VALUES,
    *_OBJECTS,
    *_ARRAYS,
    *_STRINGS,
    *_FORMAT_CASES,
    *_NUMBERS,
    *_COMBINED,
    *_REFERENCES,
    *_ANNOTATIONS,
)
"""What grammars say about all of these is exactly right."""

LOOSE_CASES: tuple[SchemaCase, ...] = (
    SchemaCase(
        "date: a leap day of any year, and the year 0",
        {"type": "string", "format": "date"},
        invalid=("2023-02-29", "0000-01-01"),
    ),
    SchemaCase(
        "minProperties: a name may come twice",
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
        invalid_texts=('{"a": 1, "a": 2}',),
    ),
)
"""Where grammars allow what the schema does not."""

IGNORED_KEYWORDS: dict[str, Json] = {
    "contains": {"type": "integer"},
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "$dynamicRef": "#node",
    "else": {"minimum": 1},
    "if": {"type": "integer"},
    "maxContains": 1,
    "minContains": 1,
    "not": {"type": "integer"},
    "propertyNames": {"pattern": "^a"},
    "then": {"minimum": 1},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "uniqueItems": True,
}
"""Keywords that no grammar expresses, each with a value it might have."""

IGNORED_FORMATS: tuple[str, ...] = (
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
)

IGNORED_ALTERNATIVES: dict[str, Json] = {
    "that overlap": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "of patterns": {
        "type": "string",
        "oneOf": [{"pattern": "^a"}, {"pattern": "^b"}],
    },
    "of ranges": {"type": "integer", "oneOf": [{"maximum": 3}, {"minimum": 5}]},
}
"""``oneOf`` whose branches are not known to exclude each other; they are read as ``anyOf``."""

REFUSED_SCHEMAS: dict[str, Json] = {
    "patternProperties that overlap": {
        "type": "object",
        "patternProperties": {"^b": {"type": "integer"}, "c$": {"type": "string"}},
    },
    "look-ahead": {"type": "string", "pattern": "^(?!a)b"},
    "word boundary": {"type": "string", "pattern": "\\bab"},
    "back reference": {"type": "string", "pattern": "^(a)\\1$"},
    "lengths that cross": {"type": "string", "minLength": 4, "maxLength": 2},
    "bounds that cross": {"type": "integer", "minimum": 4, "maximum": 2},
    "a required property that must not be": {
        "type": "object",
        "properties": {"a": False},
        "required": ["a"],
    },
    "a required property that a closed object lacks": {
        "type": "object",
        "required": ["z"],
        "additionalProperties": False,
    },
    "a bound beyond 64 bits": {"type": "integer", "minimum": -(10**30)},
    "no value": {"enum": []},
    "no type": {"type": []},
    "no schema": {"anyOf": []},
    "items that are a list": {"type": "array", "items": [{"type": "integer"}, "x"]},
    "options of the compiler": {
        "type": "array",
        "uniqueItems": True,
        "x-guidance": {"lenient": True},
    },
}
"""Schemas whose keywords are known and that cannot be followed all the same."""
