"""A conversation becomes a prompt, a grammar, and a way to read the answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.engines.fake_engine import FakeEngine

from machd.engine.backend.mlx_lm_import import import_mlx_lm
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.loading.formats.gguf.header import read_gguf_header
from machd.engine.loading.tokenizer_files import gguf_tokenizer
from machd.engine.protocol.chat_format import ChatFormat, TextState
from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.errors import GrammarError, InvalidRequestError
from machd.reading.chat_output import ChatOutput
from machd.reading.conversation import PreparedConversation, prepare_conversation
from machd.reading.output import Content, Reasoning, ToolCallStart, joined_pieces
from machd.request.constraint import Constraint, ConstraintKind
from machd.request.conversation import Conversation, FunctionTool, ToolChoice, ToolChoiceMode

TOOL = FunctionTool("f", "Does it.", {"type": "object", "properties": {"a": {"type": "integer"}}})
USER: dict[str, object] = {"role": "user", "content": "hi"}
ASK = Conversation([USER])
WITH_TOOL = replace(ASK, tools=(TOOL,))
REQUIRED = ToolChoice(ToolChoiceMode.REQUIRED)
SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object"}', "response_format")
THOUGHTS = ("<think>", "</think>")


@dataclass
class Parts:
    """As much of an engine as is asked here."""

    tokenizer: object
    model = FakeEngine().model
    media = None


class FormatTokenizer(FakeTokenizer):
    """The fake's with another format."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._format = chat_format

    @property
    def chat_format(self) -> ChatFormat:
        """The one that it was given."""
        return self._format


def _prepared(
    conversation: Conversation, tokenizer: object | None = None
) -> tuple[str, PreparedConversation, list[Constraint]]:
    parts = Parts(tokenizer or FakeTokenizer())
    prepared = prepare_conversation(conversation, parts)  # type: ignore[arg-type]
    text = bytes(prepared.prompt).decode() if isinstance(parts.tokenizer, FakeTokenizer) else ""
    return text, prepared, list(prepared.constraints)


def _output(prepared: PreparedConversation) -> ChatOutput:
    assert isinstance(prepared.guidance.output, ChatOutput)
    return prepared.guidance.output


def test_a_plain_conversation_is_as_it_was() -> None:
    """The prompt of old, no grammar, and no calls looked for."""
    text, prepared, asked = _prepared(ASK)
    assert text == "user: hi\nassistant: "
    assert asked == []
    assert prepared.guidance.output.markers == THOUGHTS
    parser = prepared.guidance.output.parser()
    assert [*parser.push("<tool_call>"), *parser.finish(is_cut=False)] == [Content("<tool_call>")]


def test_tools_are_shown_as_templates_expect_them() -> None:
    """All keys are there, even those that the client left out."""
    text, prepared, _ = _prepared(replace(ASK, tools=(FunctionTool("g"),)))
    shown = json.loads(text.splitlines()[0].removeprefix("tools: "))
    schema = {"type": "object", "properties": {}}
    function = {"name": "g", "description": "", "parameters": schema}
    assert shown == [{"type": "function", "function": function}]
    assert "<tool_call>" in prepared.guidance.output.markers
    parser = prepared.guidance.output.parser()
    (start, *_) = parser.push('<tool_call>{"name": "g", "arguments": {}}</tool_call>')
    assert isinstance(start, ToolCallStart)


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    """With ``none`` they could as well not be there."""
    none = replace(WITH_TOOL, tool_choice=ToolChoice(ToolChoiceMode.NONE), constraint=SCHEMA)
    text, prepared, asked = _prepared(none)
    assert text == "user: hi\nassistant: "
    assert _output(prepared).tools == ()
    assert asked == [SCHEMA]


@pytest.mark.parametrize(
    ("thinks", "ends", "is_open"),
    [(True, "assistant: <think>", True), (None, "assistant: ", False)],
)
def test_thoughts_begin_where_the_prompt_says(
    *, thinks: bool | None, ends: str, is_open: bool
) -> None:
    """An opened thought belongs to the prompt; the answer begins inside of it."""
    text, prepared, _ = _prepared(replace(ASK, thinks=thinks, thinking_budget_tokens=7))
    assert text.endswith(ends)
    thinking = prepared.guidance.thinking
    assert thinking is not None
    assert thinking.is_open is is_open
    assert thinking.budget_tokens == 7
    assert bytes(thinking.start_token_ids) == b"<think>"
    assert bytes(thinking.end_token_ids) == b"</think>"
    (piece,) = prepared.guidance.output.parser().push("a")
    assert piece == (Reasoning("a") if is_open else Content("a"))


def test_who_is_told_not_to_think_has_no_thoughts() -> None:
    """A grammar then holds from the first token."""
    _, prepared, _ = _prepared(replace(ASK, thinks=False))
    assert prepared.guidance.thinking is None


def test_a_template_that_opens_thoughts_regardless_has_them_closed() -> None:
    """A model without a switch is told not to think: the engine ends its thoughts at once."""

    class Opening(FakeTokenizer):
        def render_chat(self, *_args: object, **_options: object) -> str:
            return "<think>\n"

    _, prepared, _ = _prepared(replace(ASK, thinks=False), Opening())
    assert prepared.guidance.thinking is not None
    assert prepared.guidance.thinking.is_open
    assert prepared.guidance.thinking.budget_tokens == 0


def test_a_model_without_thoughts_has_none() -> None:
    """Whatever is asked."""
    tokenizer = FormatTokenizer(ChatFormat(shows_tools=True))
    _, prepared, _ = _prepared(replace(ASK, thinks=True), tokenizer)
    assert prepared.guidance.thinking is None


def test_required_calls_are_forced_and_then_read() -> None:
    """In the model's own spelling where that is JSON between markers."""
    _, prepared, (_, asked) = _prepared(replace(WITH_TOOL, tool_choice=REQUIRED, constraint=SCHEMA))
    assert asked.kind is ConstraintKind.CALLS
    assert asked.param == "tools"
    assert "<tool_call>" in asked.source
    assert not _output(prepared).has_bare_calls
    assert not prepared.guidance.output.stops_after_call


@pytest.mark.parametrize(
    "choice",
    [
        ToolChoice(allows_parallel=False),
        ToolChoice(ToolChoiceMode.REQUIRED, allows_parallel=False),
        ToolChoice(ToolChoiceMode.REQUIRED, name="f"),
    ],
)
def test_one_call_ends_the_answer(choice: ToolChoice) -> None:
    """A client that forbids parallel calls or names one gets one."""
    _, prepared, _ = _prepared(replace(WITH_TOOL, tool_choice=choice))
    assert prepared.guidance.output.stops_after_call


XML = ChatFormat(
    tool_format="qwen3_coder", tool_markers=("<tool_call>", "</tool_call>"), shows_tools=True
)
LLAMA = ChatFormat(shows_tools=True)


@pytest.mark.parametrize("chat_format", [XML, LLAMA])
def test_other_spellings_are_forced_as_bare_json(chat_format: ChatFormat) -> None:
    """And read as such: markers inside of arguments mean nothing then."""
    forced = replace(WITH_TOOL, tool_choice=REQUIRED)
    _, prepared, (_, asked) = _prepared(forced, FormatTokenizer(chat_format))
    assert "<tool_call>" not in asked.source
    parser = prepared.guidance.output.parser()
    pieces = parser.push('{"name": "f", "arguments": {"a": "<tool_call>"}}')
    assert isinstance(pieces[0], ToolCallStart)
    assert not any(isinstance(piece, Content) for piece in [*pieces, *parser.finish(is_cut=False)])


def test_a_constraint_leaves_room_for_calls() -> None:
    """With ``auto`` the answer keeps to the schema, or is calls as the model writes them."""
    conversation = replace(WITH_TOOL, constraint=SCHEMA)
    for tokenizer in (None, FormatTokenizer(XML), FormatTokenizer(LLAMA)):
        _, _, (asked,) = _prepared(conversation, tokenizer)
        assert asked.param == "response_format"
        assert "start: answer | calls" in asked.source
    engine = FakeEngine()
    for chat_format in (engine.tokenizer.chat_format, XML, LLAMA):
        parts = Parts(FormatTokenizer(chat_format))
        prepared = prepare_conversation(conversation, parts)  # type: ignore[arg-type]
        for constraint in prepared.constraints:
            engine.grammars.compile(constraint)


def test_a_final_message_goes_on() -> None:
    """The prompt ends inside of it, and the answer is text from its first character."""
    begun: dict[str, object] = {"role": "assistant", "content": "I thi"}
    headed = ChatFormat(first_state="header", transitions={"header": [("to=me", "normal")]})
    conversation = Conversation([USER, begun], continues_final_message=True)
    text, prepared, _ = _prepared(conversation, FormatTokenizer(headed))
    assert text.endswith("assistant: I thi")
    assert _output(prepared).starts_in is TextState.NORMAL
    _, prepared, _ = _prepared(ASK, FormatTokenizer(headed))
    assert _output(prepared).starts_in is TextState.HEADER


@pytest.mark.parametrize("thinks", [True, False, None])
@pytest.mark.parametrize(
    ("content", "is_open"),
    [
        ("<think>\nLet me", True),
        ("<think>Let me see. ", True),
        ("Well. <think>a</think> b <think> Let me", True),
        ("<think>\n", True),
        ("<think>\nLet me</think>\nPar", False),
        ("Let me", False),
        ("a </think> b", False),
    ],
)
def test_final_message_that_ends_in_a_thought_goes_on_as_thought(
    *, content: str, is_open: bool, thinks: bool | None
) -> None:
    """The rest of a thought is reasoning up to its end, its first space included; what follows is content."""
    asked: list[dict[str, object]] = [
        {"role": "user", "content": "What does <think> mean?"},
        {"role": "assistant", "content": content},
    ]
    conversation = Conversation(asked, continues_final_message=True, thinks=thinks)
    _, prepared, _ = _prepared(conversation)
    thinking = prepared.guidance.thinking
    assert (thinking is not None and thinking.is_open) is is_open
    parser = prepared.guidance.output.parser()
    assert parser.is_thinking is is_open
    pieces = joined_pieces([*parser.push(" think</think>\n\nParis"), *parser.finish(is_cut=False)])
    if is_open:
        gap = "" if content == "<think>\n" else " "
        assert pieces == (Reasoning(f"{gap}think"), Content("Paris"))
    else:
        assert all(isinstance(piece, Content) for piece in pieces)


@pytest.mark.parametrize("thinks", [False, None])
def test_marker_of_thoughts_in_a_question_opens_none(*, thinks: bool | None) -> None:
    """Only the end of the prompt opens a thought."""
    asked: list[dict[str, object]] = [{"role": "user", "content": "Go on: <think>"}]
    _, prepared, _ = _prepared(Conversation(asked, thinks=thinks))
    assert prepared.guidance.thinking is None or not prepared.guidance.thinking.is_open


def test_no_grammar_for_answers_of_several_messages() -> None:
    """It would have to hold inside of one of them alone."""
    headed = ChatFormat(
        shows_tools=True, first_state="header", transitions={"header": [("to=me", "normal")]}
    )
    for conversation, param in (
        (replace(ASK, constraint=SCHEMA), "response_format"),
        (replace(WITH_TOOL, tool_choice=REQUIRED), "tool_choice"),
    ):
        with pytest.raises(InvalidRequestError, match="several messages") as caught:
            _prepared(conversation, FormatTokenizer(headed))
        assert caught.value.param == param


def test_a_refusal_names_the_clients_field() -> None:
    """Messages may have come as ``input`` or another."""

    class Refusing(FakeTokenizer):
        def render_chat(self, *_args: object, **_options: object) -> str:
            raise InvalidRequestError("no", param="messages")

    with pytest.raises(InvalidRequestError) as caught:
        _prepared(replace(ASK, messages_param="input"), Refusing())
    assert caught.value.param == "input"


def test_template_variables_are_handed_on() -> None:
    """With what thinking adds to them."""
    seen: dict[str, object] = {}

    class Seeing(FakeTokenizer):
        def render_chat(self, *_args: object, **options: object) -> str:
            variables = options["variables"]
            assert isinstance(variables, Mapping)
            seen.update(variables)
            return "x"

    _prepared(replace(ASK, template_variables={"mood": "good"}, thinks=False), Seeing())
    assert seen == {"mood": "good", "enable_thinking": False}


def test_a_schema_that_cannot_be_used_is_the_clients() -> None:
    """A tool's schema that leads nowhere is refused where a call is forced."""
    tool = FunctionTool("f", parameters={"type": "object", "$ref": "#/a"})
    conversation = replace(ASK, tools=(tool,), tool_choice=REQUIRED)
    engine = FakeEngine()
    first, _ = prepare_conversation(conversation, engine).constraints
    with pytest.raises(GrammarError) as caught:
        engine.grammars.compile(first)
    assert caught.value.param == "tools"


@functools.cache
def _smollm(path: Path) -> MlxTokenizer:
    import_mlx_lm()
    return gguf_tokenizer(read_gguf_header(path), chat_template=None)[0]


def test_the_embedded_model_is_told_of_tools(embedded_model_path: Path) -> None:
    """Its template shows none; machd writes them, and reads calls as it asked for them."""
    tokenizer = _smollm(embedded_model_path)
    assert not tokenizer.chat_format.shows_tools
    history: list[dict[str, object]] = [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "forty-two"},
    ]
    conversation = Conversation(history, tools=(TOOL,))
    _, prepared, _ = _prepared(conversation, tokenizer)
    text = "".join(tokenizer.token_bytes(one).decode() for one in prepared.prompt)
    assert '"name": "f", "description": "Does it."' in text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<tool_response>\nforty-two\n</tool_response>" in text
    parser = prepared.guidance.output.parser()
    (start, *_) = parser.push('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    assert isinstance(start, ToolCallStart)
    _, _, (_, asked) = _prepared(replace(conversation, tool_choice=REQUIRED), tokenizer)
    assert '"<tool_call>"' in asked.source
