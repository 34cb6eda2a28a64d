"""Grammars that force calls allow just what the parser reads, and nothing else."""

from __future__ import annotations

import functools

import pytest
from tokenizers import AddedToken

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.fake.tokenizer import END_OF_TEXT, VOCABULARY_TOKENS, FakeTokenizer
from machd.engine.grammar.grammar import LlguidanceCompiler, compiled
from machd.engine.protocol.tokenizer import Tokenizer
from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.errors import InvalidRequestError
from machd.reading.chat_output import ChatOutput
from machd.reading.output import ToolCallArguments, ToolCallEnd, ToolCallStart
from machd.reading.tool_grammar import CallSpelling, answer_or_calls, forced_calls
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.conversation import FunctionTool, ToolChoice, ToolChoiceMode

FAKE = FakeTokenizer()
MARKERS = ("<tool_call>", "</tool_call>")
MARKED = CallSpelling.between(FAKE, MARKERS)
BARE = CallSpelling()
REQUIRED = ToolChoice(ToolChoiceMode.REQUIRED)
TOOLS = (
    FunctionTool(
        "weather",
        parameters={
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"type": "string"}},
        },
    ),
    FunctionTool('odd "näme" \\'),
)
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
ODD = '{"name": "odd \\"n\\u00e4me\\" \\\\", "arguments": {"x": [1]}}'


def _compiler(tokenizer: Tokenizer = FAKE) -> LlguidanceCompiler:
    if tokenizer is FAKE:
        return LlguidanceCompiler(FAKE, VOCABULARY_TOKENS, frozenset({END_OF_TEXT}))
    return LlguidanceCompiler(tokenizer, tokenizer.vocabulary_tokens, frozenset({0}))


def _allows(constraint: Constraint, text: str, tokenizer: Tokenizer = FAKE) -> bool:
    grammar = _compiler(tokenizer).compile(constraint)
    matcher = compiled(grammar).llmatcher.deep_copy()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.consume_tokens(token_ids)) and bool(matcher.is_accepting())


def _block(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (_block(PARIS), True),
        (_block(ODD), True),
        (f"{_block(PARIS)}\n{_block(ODD)}", True),
        (_block('{"name": "weather", "arguments": {"town": "Paris"}}'), False),
        (_block('{"name": "other", "arguments": {}}'), False),
        (PARIS, False),
        ("I do not want to.", False),
        ("", False),
        (f"{_block(PARIS)} and text", False),
    ],
)
def test_a_required_call_is_a_call(text: str, *, is_allowed: bool) -> None:
    """Calls of the named functions with arguments of their schemas, and nothing beside them."""
    constraint = forced_calls(TOOLS, REQUIRED, MARKED)
    assert constraint.kind is ConstraintKind.CALLS
    assert constraint.param == "tools"
    assert _allows(constraint, text) is is_allowed


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [(PARIS, True), (f"[{PARIS}, {ODD}]", True), (f"[{ODD}]", True), ("[]", False)],
)
def test_without_markers_calls_are_an_object_or_an_array(text: str, *, is_allowed: bool) -> None:
    """For spellings of which there is no grammar."""
    assert _allows(forced_calls(TOOLS, REQUIRED, BARE), text) is is_allowed


def test_one_call_is_one_call() -> None:
    """A name, or a client that wants no parallel calls, allows exactly one."""
    named = forced_calls(TOOLS, ToolChoice(ToolChoiceMode.REQUIRED, "weather"), MARKED)
    single = forced_calls(TOOLS, ToolChoice(ToolChoiceMode.REQUIRED, allows_parallel=False), MARKED)
    two = f"{_block(PARIS)}\n{_block(PARIS)}"
    for constraint in (named, single):
        assert _allows(constraint, _block(PARIS))
        assert not _allows(constraint, two)
    assert not _allows(named, _block(ODD))
    assert _allows(single, _block(ODD))


def test_equal_requests_have_equal_text() -> None:
    """Compiled grammars are cached by their text."""
    assert forced_calls(TOOLS, REQUIRED, MARKED) == forced_calls(tuple(TOOLS), REQUIRED, MARKED)


def test_whatever_a_grammar_allows_is_read_as_calls() -> None:
    """The grammar's spelling and the parser's are the same."""
    tools = tuple({"type": "function", "function": {"name": tool.name}} for tool in TOOLS)
    for text, is_bare in (
        (f"{_block(PARIS)}\n{_block(ODD)}", False),
        (f"[{PARIS}, {ODD}]", True),
    ):
        output = ChatOutput(
            FAKE.chat_format, tools, has_bare_calls=is_bare, has_marked_calls=not is_bare
        )
        parser = output.parser()
        pieces = [*parser.push(text), *parser.finish(is_cut=False)]
        assert [one.name for one in pieces if isinstance(one, ToolCallStart)] == [
            tool.name for tool in TOOLS
        ]
        assert sum(isinstance(one, ToolCallEnd) for one in pieces) == 2
        assert all(
            isinstance(one, ToolCallStart | ToolCallArguments | ToolCallEnd) for one in pieces
        )


def test_keyword_beyond_grammars_is_named() -> None:
    """A keyword of a tool's schema that no grammar expresses is left out, and the grammar names it."""
    schema = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
    forced = forced_calls([FunctionTool("f", parameters=schema)], REQUIRED, BARE)
    assert _allows(forced, '{"name": "f", "arguments": {"a": 2}}')
    assert _compiler().compile(forced).ignored_keywords == ("not",)


def test_arguments_hold_no_key_that_their_schema_does_not_name() -> None:
    """Arguments with ``properties`` are closed, unless their schema opens them."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    closed = forced_calls([FunctionTool("f", parameters=schema)], REQUIRED, BARE)
    opened = forced_calls(
        [FunctionTool("f", parameters={**schema, "additionalProperties": True})], REQUIRED, BARE
    )
    assert not _allows(closed, '{"name": "f", "arguments": {"b": 2}}')
    assert _allows(opened, '{"name": "f", "arguments": {"b": 2}}')


@pytest.mark.parametrize(
    ("kind", "source", "answer"),
    [
        (ConstraintKind.JSON_OBJECT, "", '{"a": 1}'),
        (ConstraintKind.JSON_SCHEMA, '{"const": "x"}', '"x"'),
        (ConstraintKind.CHOICE, '["ja", "ne\\"in"]', 'ne"in'),
        (ConstraintKind.REGEX, "a/b\\/[/]c", "a/b//c"),
    ],
)
def test_an_answer_or_calls(kind: ConstraintKind, source: str, answer: str) -> None:
    """The constraint holds for text; calls may stand in its place."""
    constraint = Constraint(kind, source, "response_format")
    combined = answer_or_calls(constraint, TOOLS, ToolChoice(), MARKED)
    assert combined.param == "response_format"
    assert _allows(combined, answer)
    assert _allows(combined, _block(PARIS))
    assert not _allows(combined, answer + _block(PARIS))
    assert not _allows(combined, "anything")


def test_a_grammar_beside_tools_is_refused() -> None:
    """Two grammars of foreign making cannot be put together."""
    constraint = Constraint(ConstraintKind.GRAMMAR, 'start: "a"', "grammar")
    with pytest.raises(InvalidRequestError, match="tool_choice none") as caught:
        answer_or_calls(constraint, TOOLS, ToolChoice(), MARKED)
    assert caught.value.param == "grammar"


@functools.cache
def _with_tokens() -> MlxTokenizer:
    """A byte-level tokenizer whose markers are tokens, a special one and a plain one."""
    import_mlx_lm()
    from support.engines.tiny_models import tiny_tokenizer  # noqa: PLC0415 - after import_mlx_lm()

    wrapped = tiny_tokenizer().wrapped
    wrapped.add_tokens([AddedToken("<tool_call>", special=True)], special_tokens=True)
    wrapped.add_tokens([AddedToken("</tool_call>", special=False, normalized=False)])
    return MlxTokenizer(wrapped)


def test_a_marker_that_is_a_token_is_that_token() -> None:
    """Special or not, the model writes the token that it knows; the text is read the same."""
    tokenizer = _with_tokens()
    spelling = CallSpelling.between(tokenizer, MARKERS)
    (start,) = tokenizer.encode("<tool_call>", add_special_tokens=False)
    assert spelling.start == f"<[{start}]>"
    constraint = forced_calls(TOOLS[:1], REQUIRED, spelling)
    assert _allows(constraint, _block(PARIS), tokenizer)
    assert not _allows(constraint, PARIS, tokenizer)


def test_a_model_may_call_in_its_own_way_beside_a_constraint() -> None:
    """After its marker anything may follow, special tokens too, and then the end."""
    tokenizer = _with_tokens()
    spelling = CallSpelling.native(tokenizer, "<tool_call>", frozenset({0}))
    constraint = Constraint(ConstraintKind.JSON_OBJECT, "", "response_format")
    combined = answer_or_calls(constraint, TOOLS, ToolChoice(), spelling)
    assert _allows(combined, '{"a": 1}', tokenizer)
    text = "<tool_call><function=f>\n<tool_call></tool_call>"
    assert _allows(combined, text, tokenizer)
    assert not _allows(combined, f"x{text}", tokenizer)


def test_parameters_are_an_object_whatever_they_say() -> None:
    """A schema without a type, or with another, still makes arguments an object."""
    schemas: list[dict[str, object]] = [{}, {"properties": {}}, {"type": ["object", "null"]}]
    for schema in schemas:
        tool = FunctionTool("f", parameters=schema)
        constraint = forced_calls([tool], REQUIRED, BARE)
        assert _allows(constraint, '{"name": "f", "arguments": {}}')
        assert not _allows(constraint, '{"name": "f", "arguments": null}')
