"""Grammars that make a model call, or let it call beside a constrained answer.

They are Lark in llguidance's dialect. Equal requests give equal text, by which compiled grammars are
cached. A marker that is one token is written as that token: spelled out in pieces it would not be
the one that the model knows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import InvalidRequestError
from machd.request.bounded_schema import bounded_schema
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.conversation import FunctionTool, ToolChoice, ToolChoiceMode
from machd.request.expressible_schema import expressible_schema
from machd.request.schema_bounds import check_constraint, check_schemas

_PARAM = "tools"

_MAX_CALLS = 16
"""Most calls of one forced answer: a small model does not stop calling by itself."""

_STYLE = {
    "whitespace_flexible": False,
    "key_separator": ": ",
    "item_separator": ", ",
    "json_allowed_escapes": 'nrbtf\\"',
    "lenient": True,
}
"""See ``engine/grammar/grammar.py``."""


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """The spelling of calls in a grammar.

    Attributes:
        start: Lark of the text before a call; None for bare JSON.
        end: Lark of the text after it.
        argument_keys: Allowed keys of the arguments.
        free: Instead of JSON, anything may follow ``start``, to the end of the text; Lark for any
            token but those that end it. Only where calls are not forced.
    """

    start: str | None = None
    end: str | None = None
    argument_keys: tuple[str, ...] = ("arguments",)
    free: str | None = None

    @classmethod
    def between(cls, tokenizer: Tokenizer, markers: tuple[str, str]) -> CallSpelling:
        """Return the spelling of JSON between markers."""
        start, end = markers
        return cls(_marker(tokenizer, start), _marker(tokenizer, end))

    @classmethod
    def native(
        cls, tokenizer: Tokenizer, start: str, eos_token_ids: frozenset[int]
    ) -> CallSpelling:
        """Return the model's own spelling, from its marker on."""
        ids = ",".join(str(one) for one in sorted(eos_token_ids))
        return cls(start=_marker(tokenizer, start), free=f"<[^{ids}]>*")


def forced_calls(
    tools: Sequence[FunctionTool], choice: ToolChoice, spelling: CallSpelling
) -> Constraint:
    """Return the grammar of an answer of calls alone: at least one, or exactly one if the choice says so.

    There is at least one tool, and the spelling is not a free one.
    """
    assert spelling.free is None, "text that may be anything forces nothing"
    start, rules = _calls(tools, choice, spelling)
    return _constraint([f"start: {start}", *rules], _PARAM, tools)


def arguments_alone(tool: FunctionTool) -> Constraint:
    """Return the grammar of one tool's arguments: compiled by itself, it shows which schema is wrong.

    Raises:
        GrammarError: The grammar exceeds a limit.
    """
    check_schemas([tool.parameters], param=_PARAM)
    return _constraint([f"start: %json {json.dumps(_arguments(tool)[0])}"], _PARAM, [tool])


def answer_or_calls(
    answer: Constraint, tools: Sequence[FunctionTool], choice: ToolChoice, spelling: CallSpelling
) -> Constraint:
    """Return the grammar of text under a constraint, or calls in its place.

    Raises:
        InvalidRequestError: The constraint cannot be combined with tools.
    """
    check_constraint(answer)
    answer_rule = _answer(answer)
    start, rules = _calls(tools, choice, spelling)
    return _constraint(
        ["start: answer | calls", f"answer: {answer_rule}", f"calls: {start}", *rules],
        answer.param,
        tools if spelling.free is None else (),
        answer,
    )


def _constraint(
    rules: list[str], param: str, tools: Sequence[FunctionTool], answer: Constraint | None = None
) -> Constraint:
    source = "\n".join(["%llguidance {}", *rules, ""])
    ignored = frozenset[str]().union(*(_arguments(tool)[1] for tool in tools))
    if answer is not None and answer.kind is ConstraintKind.JSON_SCHEMA:
        ignored |= _schema(json.loads(answer.source))[1]
    return Constraint(ConstraintKind.CALLS, source, param, ignored)


def _calls(
    tools: Sequence[FunctionTool], choice: ToolChoice, spelling: CallSpelling
) -> tuple[str, list[str]]:
    """Return the right side of a rule for calls, and the rules that it needs."""
    if spelling.free is not None:
        return f"{spelling.start} {spelling.free}", []
    check_schemas([tool.parameters for tool in tools], param=_PARAM)
    is_forced = choice.mode is ToolChoiceMode.REQUIRED
    named = [tool for tool in tools if not is_forced or choice.name in (None, tool.name)]
    is_single = not choice.allows_parallel or (is_forced and choice.name is not None)
    more = f"{{0,{_MAX_CALLS - 1}}}"
    rules = [f"object: {' | '.join(f'object_{index}' for index in range(len(named)))}"]
    for index, tool in enumerate(named):
        rules += _object(index, tool, spelling.argument_keys)
    if spelling.start is not None:
        rules.append(f'call: {spelling.start} "\\n" object "\\n" {spelling.end}')
        return ("call" if is_single else f'call ("\\n" call){more}'), rules
    return ("object" if is_single else f'object | "[" object (", " object){more} "]"'), rules


def _object(index: int, tool: FunctionTool, keys: Sequence[str]) -> list[str]:
    begin = f'{{"name": {json.dumps(tool.name)}, '
    openings = " | ".join(_text(f'{begin}"{key}": ') for key in keys)
    return [
        f'object_{index}: ({openings}) arguments_{index} "}}"',
        f"arguments_{index}: %json {json.dumps(_arguments(tool)[0])}",
    ]


def _arguments(tool: FunctionTool) -> tuple[Mapping[str, object], frozenset[str]]:
    """Return the schema of a tool's arguments, always an object, and its keywords that grammars ignore."""
    return _schema({**(tool.parameters or {}), "type": "object"})


def _schema(schema: Mapping[str, object]) -> tuple[Mapping[str, object], frozenset[str]]:
    """Return a schema for llguidance, and its keywords that grammars ignore."""
    rewritten, ignored = expressible_schema(bounded_schema(schema))
    return {**rewritten, "x-guidance": _STYLE}, ignored


def _answer(constraint: Constraint) -> str:
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return f"%json {json.dumps({'type': 'object', 'x-guidance': _STYLE})}"
        case ConstraintKind.JSON_SCHEMA:
            return f"%json {json.dumps(_schema(json.loads(constraint.source))[0])}"
        case ConstraintKind.CHOICE:
            return " | ".join(_text(str(one)) for one in json.loads(constraint.source))
        case ConstraintKind.REGEX:
            return f"/{_slashes_escaped(constraint.source)}/"
        case ConstraintKind.GRAMMAR | ConstraintKind.FORBIDDEN | ConstraintKind.CALLS:
            raise InvalidRequestError.at(
                constraint.param,
                "it cannot be combined with tools that the model may "
                "call; send tool_choice none, or leave it out",
            )


def _slashes_escaped(pattern: str) -> str:
    """Escape a pattern for Lark's slashes, on one line."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern)
    return escaped.replace("\n", r"\n").replace("\r", r"\r")


def _marker(tokenizer: Tokenizer, marker: str) -> str:
    token_ids = tokenizer.encode(marker, add_special_tokens=False)
    return f"<[{token_ids[0]}]>" if len(token_ids) == 1 else _text(marker)


def _text(text: str) -> str:
    """Return a text as a Lark string, which is written as in JSON."""
    return json.dumps(text, ensure_ascii=False)
