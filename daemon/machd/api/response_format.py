"""The ways to ask for an answer of a certain shape: OpenAI's, and vLLM's two.

All of them become one :class:`Constraint`; a request may have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct

from machd.api.bounds import Choices, Description, GrammarText, RegexText, ToolName
from machd.api.constraint import Constraint, ConstraintKind
from machd.api.raw_json import (
    ObjectSource,
    Schema,
    is_given,
    raw_object,
    raw_schema_text,
)
from machd.api.refusal import Ignored, Refused, neutral_values, refuse_unsupported
from machd.errors import InvalidRequestError

__all__ = [
    "JsonObjectFormat",
    "JsonSchema",
    "JsonSchemaFormat",
    "ResponseFormat",
    "StructuredOutputs",
    "TextFormat",
    "choice_constraint",
    "format_constraint",
    "json_object_constraint",
    "json_schema_constraint",
    "one_constraint",
    "source_constraints",
]


class TextFormat(Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """Any text."""


class JsonObjectFormat(Struct, frozen=True, kw_only=True, tag="json_object", tag_field="type"):
    """Any JSON object."""


class JsonSchema(Struct, frozen=True, kw_only=True):
    """A schema and its name.

    Attributes:
        description: Accepted; the model is not shown it.
        strict: Accepted; the schema is followed to the letter whatever it says.
    """

    name: ToolName
    description: Description | None = None
    schema: Schema
    strict: bool | None = None


class JsonSchemaFormat(Struct, frozen=True, kw_only=True, tag="json_schema", tag_field="type"):
    """JSON that follows a schema."""

    json_schema: JsonSchema


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
        """Those that are asked for; each names its own field.

        Raises:
            InvalidRequestError: The schema is no JSON object, or too long.
            UnsupportedParameterError: It asks for what machd does not do.
        """
        refuse_unsupported(self, _NEUTRAL, where="structured_outputs.")
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

    Raises:
        InvalidRequestError: The schema is no JSON object, or too long.
    """
    asked = []
    if isinstance(json, Raw) and is_given(json):
        param = f"{prefix}json"
        source = raw_schema_text(json, param=param)
        asked.append(Constraint(ConstraintKind.JSON_SCHEMA, source, param))
    if regex is not None:
        asked.append(Constraint(ConstraintKind.REGEX, regex, f"{prefix}regex"))
    if choice is not None:
        asked.append(choice_constraint(choice, param=f"{prefix}choice"))
    if grammar is not None:
        asked.append(Constraint(ConstraintKind.GRAMMAR, grammar, f"{prefix}grammar"))
    return asked


def format_constraint(format_: ResponseFormat | None) -> Constraint | None:
    """What ``response_format`` asks for; None for any text.

    Raises:
        InvalidRequestError: The schema is no JSON object, or too long.
    """
    match format_:
        case JsonObjectFormat():
            return json_object_constraint("response_format")
        case JsonSchemaFormat(json_schema=JsonSchema(schema=schema)):
            return json_schema_constraint(schema, param="response_format.json_schema.schema")
        case _:
            return None


def json_object_constraint(param: str) -> Constraint:
    """Any JSON object."""
    return Constraint(ConstraintKind.JSON_OBJECT, "", param)


def json_schema_constraint(schema: Raw, *, param: str) -> Constraint:
    """JSON that follows a schema.

    Raises:
        InvalidRequestError: The schema is no JSON object, or too long.
    """
    raw_object(schema, param=param)
    return Constraint(ConstraintKind.JSON_SCHEMA, bytes(schema).decode(), param)


def choice_constraint(choices: list[str], *, param: str) -> Constraint:
    """One of several texts."""
    return Constraint(ConstraintKind.CHOICE, msgspec.json.encode(choices).decode(), param)


def one_constraint(asked: Sequence[Constraint | None]) -> Constraint | None:
    """The one constraint of a request, if it has any.

    Raises:
        InvalidRequestError: It has two; the message names both fields.
    """
    given = [one for one in asked if one is not None]
    if len(given) > 1:
        raise InvalidRequestError(
            f"{given[0].param} and {given[1].param} both say what the answer has to look like; "
            "send one of them",
            param=given[1].param,
        )
    return given[0] if given else None


_NEUTRAL = neutral_values(StructuredOutputs)
