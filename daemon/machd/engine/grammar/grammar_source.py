"""Constraints as texts in llguidance's notation.

JSON schemas are bounded and spelled in one style; everything else is handed on nearly as it came.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from machd.errors import GrammarError
from machd.request.bounded_schema import bounded_schema
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.expressible_schema import expressible_schema
from machd.request.grammar_bounds import check_recursion
from machd.request.schema_bounds import read_choices

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # there for type checkers only

_JSON_STYLE: JsonCompileOptions = {
    # Python's own style, which models have seen most. With one style only, keys and punctuation are
    # forced tokens.
    "whitespace_flexible": False,
    "key_separator": ": ",
    "item_separator": ", ",
    # llguidance knows a property by its plain spelling alone: spelled with \\u escapes its value
    # would get around the property's schema.
    "json_allowed_escapes": 'nrbtf\\"',
    # A keyword that a grammar cannot express is a warning then; see `_ignored_keywords`.
    "lenient": True,
}

_FORBIDDING = """start: TEXT
TEXT: ANY & ~(ANY FORBIDDEN ANY)
ANY: /(?s:.*)/
FORBIDDEN: {texts}
"""
"""Lark of any text that holds none of the given texts."""


def grammar_source(constraint: Constraint) -> str:
    """Write a constraint as llguidance's compiler reads it.

    Raises:
        GrammarError: It cannot be read.
    """
    return _SOURCES[constraint.kind](constraint)


def given_up_keywords(constraint: Constraint) -> frozenset[str]:
    """List the keywords of a constraint's schemas that its source does not hold any more."""
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        return _expressible(constraint)[1]
    return constraint.ignored_keywords


def _json_object(_constraint: Constraint) -> str:
    return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_STYLE)


def _json_schema(constraint: Constraint) -> str:
    rewritten, _ = _expressible(constraint)
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(rewritten), overrides=_JSON_STYLE)
    except ValueError as error:
        # A number that llguidance's parser does not read.
        raise GrammarError(f"{constraint.param}: {error}", param=constraint.param) from error


def _expressible(constraint: Constraint) -> tuple[dict[str, object], frozenset[str]]:
    return expressible_schema(bounded_schema(json.loads(constraint.source)))


def _choice(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_lark(f"start: {_alternatives(constraint)}")


def _forbidden(constraint: Constraint) -> str:
    return LLMatcher.grammar_from_lark(_FORBIDDING.format(texts=_alternatives(constraint)))


def _alternatives(constraint: Constraint) -> str:
    # In Lark a text is written as in JSON.
    return " | ".join(json.dumps(one, ensure_ascii=False) for one in read_choices(constraint))


def _grammar(constraint: Constraint) -> str:
    try:
        lark = any_to_lark(constraint.source)
    except Exception as error:  # the converter raises exceptions of any kind
        raise GrammarError(
            f"{constraint.param}: it is neither Lark nor GBNF: {error}", param=constraint.param
        ) from error
    check_recursion(lark, param=constraint.param)
    return LLMatcher.grammar_from_lark(lark)


_SOURCES: dict[ConstraintKind, Callable[[Constraint], str]] = {
    ConstraintKind.JSON_OBJECT: _json_object,
    ConstraintKind.JSON_SCHEMA: _json_schema,
    ConstraintKind.REGEX: lambda constraint: LLMatcher.grammar_from_regex(constraint.source),
    ConstraintKind.CHOICE: _choice,
    ConstraintKind.FORBIDDEN: _forbidden,
    ConstraintKind.CALLS: lambda constraint: LLMatcher.grammar_from_lark(constraint.source),
    ConstraintKind.GRAMMAR: _grammar,
}
