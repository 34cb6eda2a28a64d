"""The ways to ask for an answer of a certain shape: OpenAI's, vLLM's, llama.cpp's and Ollama's.

All of them become one :class:`Constraint`; a request may have one, said in as many ways as it likes.
Whatever reads a schema raises InvalidRequestError if that is no JSON object, or too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct

from machd.dialects.wire.bounds import Choices, Description, GrammarText, Label, RegexText
from machd.dialects.wire.raw_json import (
    ObjectSource,
    OptionalSchema,
    Schema,
    is_given,
    raw_object,
    raw_schema_text,
)
from machd.dialects.wire.refusal import Ignored, Refused, refuse_unsupported
from machd.errors import InvalidRequestError
from machd.request.constraint import Constraint, ConstraintKind


class TextFormat(Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """Any text."""


class JsonObjectFormat(Struct, frozen=True, kw_only=True, tag="json_object", tag_field="type"):
    """A JSON object: any, or one that follows llama.cpp's ``schema``."""

    schema: OptionalSchema = UNSET


class JsonSchema(Struct, frozen=True, kw_only=True):
    """A schema and its name.

    Attributes:
        name: Accepted; the model is not shown it.
        description: The same.
        strict: Accepted; the schema is followed to the letter whatever it says.
    """

    name: Label | None = None
    description: Description | None = None
    schema: Schema
    strict: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, kw_only=True, tag="json_schema", tag_field="type"):
    """JSON that follows a schema: OpenAI's ``json_schema``, or llama.cpp's bare ``schema``."""

    json_schema: JsonSchema | None = None
    schema: OptionalSchema = UNSET


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat
"""``response_format``."""


class StructuredOutputs(Struct, frozen=True, kw_only=True):
    """vLLM's ``structured_outputs``: one of the first five, or nothing."""

    json: ObjectSource = UNSET
    regex: RegexText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None

    disable_fallback: Ignored = UNSET
    structural_tag: Refused = UNSET
    whitespace_pattern: Refused = UNSET

    def constraints(self) -> list[Constraint]:
        """Return the constraints that are asked for; UnsupportedParameterError for what machd does not do."""
        refuse_unsupported(self, where="structured_outputs.")
        return source_constraints(
            self.json,
            self.regex,
            self.choice,
            self.grammar,
            prefix="structured_outputs.",
        ) + ([json_object_constraint("structured_outputs.json_object")] if self.json_object else [])


def source_constraints(
    json: ObjectSource,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    *,
    prefix: str,
) -> list[Constraint]:
    """The constraints that vLLM's four sources ask for.

    Each is what the field of its name holds, after a prefix such as ``guided_``.
    """
    asked = []
    if is_given(json):
        asked.append(_schema_source(json, f"{prefix}json"))
    if regex is not None:
        asked.append(Constraint(ConstraintKind.REGEX, regex, f"{prefix}regex"))
    if choice is not None:
        asked.append(choice_constraint(choice, param=f"{prefix}choice"))
    if grammar is not None:
        asked.append(Constraint(ConstraintKind.GRAMMAR, grammar, f"{prefix}grammar"))
    return asked


def format_constraint(format_: ResponseFormat | None) -> Constraint | None:
    """Return the constraint that ``response_format`` asks for; None for any text."""
    match format_:
        case JsonObjectFormat():
            return object_format_constraint(format_, param="response_format")
        case JsonSchemaFormat(json_schema=None, schema=schema):
            if not is_given(schema):
                raise InvalidRequestError.at("response_format.json_schema", "required, but missing")
            return json_schema_constraint(schema, param="response_format.schema")
        case JsonSchemaFormat(json_schema=JsonSchema(schema=schema)):
            return json_schema_constraint(schema, param="response_format.json_schema.schema")
        case _:
            return None


def schema_constraints(json_schema: ObjectSource, grammar: str | None) -> list[Constraint]:
    """The constraints that llama.cpp's fields ``json_schema`` and ``grammar`` ask for."""
    asked = []
    if is_given(json_schema):
        asked.append(_schema_source(json_schema, "json_schema"))
    if grammar is not None:
        asked.append(Constraint(ConstraintKind.GRAMMAR, grammar, "grammar"))
    return asked


def ollama_constraint(format_: ObjectSource) -> Constraint | None:
    """The constraint that Ollama's ``format`` asks for: the word ``json``, or a schema."""
    if not is_given(format_) or bytes(format_) == b'""':
        return None
    if bytes(format_) == b'"json"':
        return json_object_constraint("format")
    return _schema_source(format_, "format")


def forbidden_constraint(texts: list[str] | None) -> Constraint | None:
    """The constraint that ``bad_words`` asks for."""
    if not texts:
        return None
    source = msgspec.json.encode(sorted(set(texts))).decode()
    return Constraint(ConstraintKind.FORBIDDEN, source, "bad_words")


def object_format_constraint(format_: JsonObjectFormat, *, param: str) -> Constraint:
    """A JSON object: any, or one that follows the format's schema."""
    if is_given(format_.schema):
        return json_schema_constraint(format_.schema, param=f"{param}.schema")
    return json_object_constraint(param)


def json_object_constraint(param: str) -> Constraint:
    """Any JSON object."""
    return Constraint(ConstraintKind.JSON_OBJECT, "", param)


def json_schema_constraint(schema: Raw, *, param: str) -> Constraint:
    """JSON that follows a schema."""
    raw_object(schema, param=param)
    return Constraint(ConstraintKind.JSON_SCHEMA, bytes(schema).decode(), param)


def choice_constraint(choices: list[str], *, param: str) -> Constraint:
    """One of several texts."""
    return Constraint(ConstraintKind.CHOICE, msgspec.json.encode(choices).decode(), param)


def one_constraint(asked: Sequence[Constraint | None]) -> Constraint | None:
    """The one constraint of a request, if it has any; the same one said twice is one.

    Raises:
        InvalidRequestError: It has two; the message names both fields.
    """
    given = [one for one in asked if one is not None]
    for one in given[1:]:
        if _meaning(one) != _meaning(given[0]):
            raise InvalidRequestError(
                f"{given[0].param} and {one.param} both say what the answer has to look like, and "
                "differ; send one of them",
                param=one.param,
            )
    return given[0] if given else None


def _meaning(constraint: Constraint) -> tuple[ConstraintKind, object]:
    """Return the key that two equal constraints share: their sources, whatever the layout of JSON."""
    if constraint.kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.CHOICE):
        return constraint.kind, msgspec.json.decode(constraint.source)
    return constraint.kind, constraint.source


def _schema_source(source: Raw, param: str) -> Constraint:
    """JSON that follows a schema, which comes as an object or as its text."""
    return Constraint(ConstraintKind.JSON_SCHEMA, raw_schema_text(source, param=param), param)
