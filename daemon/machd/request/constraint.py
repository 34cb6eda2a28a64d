"""Constraints on the text of a completion, whatever the dialect."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ConstraintKind(StrEnum):
    """Notation of a constraint."""

    JSON_OBJECT = "json_object"
    """Any JSON object; there is no source."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema (draft 2020-12), as JSON text."""

    REGEX = "regex"
    """A regular expression, in the Rust crate's syntax, that the whole text matches."""

    CHOICE = "choice"
    """A JSON array of strings, one of which is the whole text."""

    FORBIDDEN = "forbidden"
    """A JSON array of strings, none of which occurs in the text."""

    CALLS = "calls"
    """Lark that machd itself wrote around the schemas of tools."""

    GRAMMAR = "grammar"
    """A context-free grammar, in llguidance's dialect of Lark or in GBNF."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint.

    Attributes:
        source: As :class:`ConstraintKind` says.
        param: The request field that it came from, for errors about it.
        ignored_keywords: Of ``CALLS``: keywords of the tools' schemas that ``source`` does not hold.
    """

    kind: ConstraintKind
    source: str
    param: str
    ignored_keywords: frozenset[str] = frozenset()
