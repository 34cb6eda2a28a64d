"""A model's answer is read for what it means, however it is cut and whatever is wrong with it."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from support.clients.answers import (
    BARE,
    SPELLINGS,
    chat_output,
    cut_text,
    mlx_format,
    put_together,
    read_answer,
)

from machd.engine.protocol.chat_format import ChatFormat, ParsedToolCall, TextState
from machd.reading.output import (
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

CALL = '{"name": "f", "arguments": {"a": 1}}'
MARKED = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("Hello\n there \n", "Hello\n there \n", "", 0),
        (" ", " ", "", 0),
        ("<think>\nWhy\n not\n</think>\n\n Hi ", "Hi ", "Why\n not", 0),
        ("<think>\n\n</think>\n\nHi", "Hi", "", 0),
        ("<think>never ends \n", "", "never ends", 0),
        (MARKED, "", "", 1),
        (f"Let me see.\n\n{MARKED}\n", "Let me see.", "", 1),
        (f"\n{MARKED}\n{MARKED} \n", "", "", 2),
        (f"a{MARKED} b ", "ab ", "", 1),
        (f"<think>t</think>\n{MARKED}", "", "t", 1),
        (f"<think>t\n{MARKED}\n</think>\nDone", "Done", "t", 1),
        (f"<tool_call>{CALL}\n{CALL}</tool_call>", "", "", 2),
        (f"<tool_call>{CALL}}}</tool_call>", "", "", 1),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", "", 1),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", "", 1),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", "", 1),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", 1),
        (f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', "", "", 1),
        ("a < b <tool", "a < b <tool", "", 0),
    ],
)
def test_an_answer_is_told_apart(text: str, content: str, reasoning: str, calls: int) -> None:
    """Thoughts, calls and text, with the whitespace between them left out and all other kept."""
    read = read_answer(chat_output(), [text])
    assert (read.content, read.reasoning) == (content, reasoning)
    assert [(name, json.loads(text), whole) for name, text, whole in read.calls] == [
        ("f", {"a": 1}, True)
    ] * calls


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        'Look: \n<tool_call>{"name": "f", "arguments": [1]}</tool_call> \n',
        "<tool_call></tool_call>",
        "<tool_call>this is no JSON</tool_call> and more",
        "<tool_call>{]</tool_call>",
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"name": "f"',
        "<tool_call>",
        f"<tool_call>{'[' * 3000}</tool_call>",
        '<tool_call>{"name": "f", "arguments": %s</tool_call>' % ("[" * 100_000),
        '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>',
    ],
)
def test_what_is_no_call_comes_out_as_it_was_written(text: str) -> None:
    """Unknown names, broken JSON, cut ends: content with its markers, and never an exception."""
    read = read_answer(chat_output(), [text])
    assert read.content == text
    assert not read.calls


def test_a_false_call_in_thoughts_stays_a_thought() -> None:
    """A model that thinks about markers goes on thinking until it ends its thoughts."""
    text = "<think>I could use <tool_call> here.</tool_call> No.</think>\nNo."
    read = read_answer(chat_output(), [text])
    assert read.reasoning == "I could use <tool_call> here.</tool_call> No."
    assert read.content == "No."


def test_a_prompt_may_open_the_thoughts() -> None:
    """The template wrote the opening marker, so the answer begins inside."""
    read = read_answer(chat_output(starts_in=TextState.REASONING), ["\nso\n</think>\n\nHi"])
    assert (read.reasoning, read.content) == ("so", "Hi")


def test_without_tools_calls_are_text() -> None:
    """Without functions in the request, no text is a call."""
    read = read_answer(chat_output(tools=()), [MARKED])
    assert read.content == MARKED
    assert not read.calls


def test_the_name_and_the_arguments_come_as_they_are_written() -> None:
    """The start is out before any argument, each part of the arguments before the next."""
    parser = chat_output().parser()
    assert parser.push('<tool_call>\n{"name": "get_weather"') == []
    (start,) = parser.push(', "arguments": ')[:1] or parser.push("{")[:1]
    assert isinstance(start, ToolCallStart)
    assert start.name == "get_weather"
    assert parser.push('"city": "Par') == [ToolCallArguments(0, '"city": "Par')]
    assert parser.push('is"') == [ToolCallArguments(0, 'is"')]
    assert parser.push("}") == [ToolCallArguments(0, "}"), ToolCallEnd(0)]
    assert parser.push("}\n</tool_call>") == []
    assert parser.finish(is_cut=False) == []


@pytest.mark.parametrize("cut", range(36, len(MARKED) - 15))
def test_a_call_cut_short_has_no_end(cut: int) -> None:
    """``max_tokens`` inside a call leaves the beginning of its arguments, and no text."""
    read = read_answer(chat_output(), [MARKED[:cut]], is_cut=True)
    assert read.content == ""
    for name, arguments, is_whole in read.calls:
        assert name == "f"
        assert is_whole == (arguments == '{"a": 1}')


def test_slips_inside_of_strings_are_mended() -> None:
    """Raw line ends and needless backslashes would make the arguments no JSON at all."""
    raw = '<tool_call>{"name": "f", "arguments": {"a": "x\ny\\d\\\'\\u00e9\\n"}}</tool_call>'
    ((_, arguments, is_whole),) = read_answer(chat_output(), [raw]).calls
    assert is_whole
    assert json.loads(arguments) == {"a": "x\ny\\d\\'\u00e9\n"}


def test_a_call_that_breaks_after_it_began_stays_without_an_end() -> None:
    """Text that was streamed to the client stays part of the answer."""
    read = read_answer(
        chat_output(), ['<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>']
    )
    assert read.calls[0][::2] == ("f", False)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (CALL, 1, ""),
        ('{"name": "f", "parameters": {"a": 1}}', 1, ""),
        (f"\n {CALL} \n{CALL}", 2, ""),
        (f"[{CALL}, {CALL}]", 2, ""),
        (f"{CALL}; {CALL}", 2, ""),
        (f"<think>x</think>\n{CALL}", 1, ""),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', 1, ""),
        (f"{CALL}\nThat is it. ", 1, "That is it. "),
        ('{"answer": 42}', 0, '{"answer": 42}'),
        ('{"name": "f"}', 0, '{"name": "f"}'),
        (' [1, 2] {"name": 1} ', 0, ' [1, 2] {"name": 1} '),
        ('{"name": "g", "arguments": {}} x', 0, '{"name": "g", "arguments": {}} x'),
        ("[]", 0, "[]"),
        ("{", 0, "{"),
        (f"Call: {CALL}", 0, f"Call: {CALL}"),
    ],
)
def test_calls_without_markers(text: str, calls: int, content: str) -> None:
    """An answer that begins as JSON is calls if it turns out so, and else its own text."""
    read = read_answer(chat_output(BARE, has_bare_calls=True), [text])
    assert [(name, json.loads(args), whole) for name, args, whole in read.calls] == [
        ("f", {"a": 1}, True)
    ] * calls
    assert read.content == content


WORDS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    '{"name": "f", "arguments": {"a": "\\"}<tool_call>\\\\ \\u00e9"}}',
    '{"name": "f", "arguments": {',
    '{"name": "g", "arguments": {}}',
    '"arguments"',
    ": [1.5e3, true, nul",
    "[",
    "]",
    "{",
    "}",
    ",",
    '"',
    "\\",
    " ",
    "\n",
    "text",
    "<",
    "</thi",
    "1",
]
answers = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)


@settings(max_examples=400)
@example(
    text=f"<think>a\n<tool_call>x</tool_call>b</think>{MARKED} c",
    cuts=[3, 9, 20, 30],
    is_bare=False,
)
@given(text=answers, cuts=st.lists(st.integers(0, 400), max_size=12), is_bare=st.booleans())
def test_the_cut_changes_nothing(text: str, cuts: list[int], *, is_bare: bool) -> None:
    """Any way of cutting the text gives the same content, thoughts and calls, in the same order."""
    output = chat_output(BARE, has_bare_calls=True) if is_bare else chat_output()
    whole = read_answer(output, [text])
    assert read_answer(output, cut_text(text, cuts)) == whole
    assert read_answer(output, text) == whole


@settings(max_examples=200)
@given(answers)
def test_nothing_but_markup_is_lost(text: str) -> None:
    """All letters of plain text come out somewhere."""
    read = read_answer(chat_output(), [text])
    out = read.content + read.reasoning + "".join(one[1] for one in read.calls)
    assert out.count("text") == text.count("text")


def test_a_failure_of_reading_gives_plain_text() -> None:
    """The parser's own mistakes cost the client nothing but the reading."""

    class Broken(ChatFormat):
        def parse_tool_calls(self, text: str, tools: object) -> list[ParsedToolCall]:
            raise KeyError(text, tools)

    broken = Broken(tool_markers=("<tool_call>", "</tool_call>"), tool_format="x")
    parser = chat_output(broken, model_id="m").parser()
    text = "before <tool_call>f()</tool_call>"
    with capture_logs() as logs:
        pieces = [*parser.push(text), *parser.push(" after"), *parser.finish(is_cut=False)]
    assert put_together(pieces).content == f"{text} after"
    assert [(one["event"], one["model"]) for one in logs] == [("output.unreadable", "m")]


PARIS = ("get_weather", {"city": "Paris", "days": 3})


@pytest.mark.parametrize(("name", "text", "calls"), SPELLINGS)
def test_every_spelling_that_mlx_lm_reads(name: str, text: str, calls: int) -> None:
    """Calls as models write them, thoughts and text before, at once and by the character."""
    output = chat_output(mlx_format(name))
    answer = f"<think>hm</think>I look.\n{text}\n"
    read = read_answer(output, [answer])
    assert read_answer(output, answer) == read
    assert read.content == "I look."
    assert read.reasoning == "hm"
    assert [(one, json.loads(args)) for one, args, _ in read.calls] == [PARIS] * calls
    assert all(is_whole for *_, is_whole in read.calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar"),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Par'),
        ("glm47", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><ar"),
        ("glm47", "<tool_call>what is this</tool_call>"),
        ("gemma4", "<|tool_call>call:get_weather{city:}}<tool_call|>"),
        ("pythonic", "<|tool_call_start|>[f(a={1, 2})]<|tool_call_end|>"),
        ("longcat", "<longcat_tool_call>?</longcat_tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>x"),
    ],
)
def test_other_spellings_fail_as_text(name: str, text: str) -> None:
    """A spelling that its parser cannot read, or that is not finished, is content."""
    read = read_answer(chat_output(mlx_format(name)), [text])
    assert read.content == text
    assert not read.calls


def test_the_header_of_a_message_is_no_text() -> None:
    """A response format with several messages: thoughts, calls and the answer, headers dropped."""
    from mlx_lm.chat_templates import muse_spark  # noqa: PLC0415 - only here

    states = muse_spark.RESPONSE_FORMAT
    chat_format = ChatFormat(
        tool_format="muse_spark",
        tool_markers=("<atem:function_calls>", "</atem:function_calls>"),
        transitions=states["transitions"],
        first_state=states["initial_state"],
        parse=mlx_format("muse_spark").parse,
    )
    output = chat_output(chat_format, starts_in=chat_format.opening_state)
    text = (
        "to=self<|message|>hm<|eom|><|start|>assistant to=f<|message|><atem:function_calls>"
        '<atem:invoke name="f"><atem:parameter name="a">1</atem:parameter></atem:invoke>'
        "</atem:function_calls><|eom|><|start|>assistant to=user<|message|>Hi<|eot|>"
    )
    read = read_answer(output, [text])
    assert read_answer(output, text) == read
    assert (read.reasoning, read.content) == ("hm", "Hi")
    assert [one[0] for one in read.calls] == ["f"]
    silent = chat_output(chat_format, tools=(), starts_in=chat_format.opening_state)
    assert "atem:invoke" in read_answer(silent, [text]).content
