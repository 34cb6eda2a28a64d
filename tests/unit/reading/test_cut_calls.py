"""A text that is cut inside a call gives no content: neither markers nor the call's own text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.clients.answers import (
    BARE,
    FAKE,
    SPELLINGS,
    Read,
    chat_output,
    cut_text,
    mlx_format,
    read_answer,
)

from machd.reading.chat_output import ChatOutput

_MARKER = "<tool_call>"
_MARKED = chat_output(FAKE)
_ARGUMENTS = [
    {},
    {"a": 1},
    {"city": 'a "quoted" {city}', "days": -1.5e3},
    {"city": "\\ \n[é]<tool_call>", "nested": {"name": "f", "arguments": [{}, []]}},
]

names = st.sampled_from(["f", "get_weather"])
arguments = st.sampled_from(_ARGUMENTS)


@st.composite
def _json_calls(draw: st.DrawFn) -> str:
    """One call in one of the shapes that models write as JSON."""
    name, values = draw(names), draw(arguments)
    key = draw(st.sampled_from(["arguments", "parameters"]))
    call: dict[str, object] = {"name": name, key: values}
    if draw(st.booleans()):
        call = {key: values, "name": name}
    if draw(st.booleans()):
        call = {"type": "function", **call}
    if draw(st.booleans()):
        call = {"id": "call_1", "type": "function", "function": call}
    return json.dumps(
        call, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))
    )


marked_calls = st.lists(
    st.tuples(st.lists(_json_calls(), min_size=1, max_size=2), st.sampled_from(["\n", "", " "])),
    min_size=1,
    max_size=3,
).map(
    lambda sections: "\n".join(
        f"<tool_call>{gap}{gap.join(calls)}{gap}</tool_call>" for calls, gap in sections
    )
)
bare_calls = st.tuples(
    st.lists(_json_calls(), min_size=1, max_size=3),
    st.sampled_from(["list", "lines", "semicolons"]),
).map(
    lambda drawn: (
        f"[{', '.join(drawn[0])}]"
        if drawn[1] == "list"
        else {"lines": "\n", "semicolons": "; "}[drawn[1]].join(drawn[0])
    )
)


def _check_cut(output: ChatOutput, text: str, length: int, cuts: Sequence[int]) -> None:
    """Cut ``text`` after ``length`` characters and push it in pieces; the calls are those of the whole."""
    whole = read_answer(output, [text])
    beginning = text[:length]
    read = read_answer(output, cut_text(beginning, cuts), is_cut=True)
    assert read.content == ""
    assert read == read_answer(output, beginning, is_cut=True)
    for (name, so_far, is_whole), (whole_name, whole_text, _) in zip(
        read.calls, whole.calls, strict=False
    ):
        assert name == whole_name
        assert whole_text.startswith(so_far)
        assert not is_whole or so_far == whole_text
    assert all(is_whole for *_, is_whole in read.calls[:-1])
    assert len(read.calls) <= len(whole.calls)


@settings(max_examples=120)
@example(
    text='<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n{"na',
    length=1000,
    cuts=[],
    is_forced=True,
)
@given(
    text=marked_calls,
    length=st.integers(0, 600),
    cuts=st.lists(st.integers(0, 600), max_size=8),
    is_forced=st.booleans(),
)
def test_marked_calls_cut_anywhere_give_no_content(
    text: str, length: int, cuts: list[int], *, is_forced: bool
) -> None:
    """JSON between markers, cut at any character and however it comes: calls and nothing else."""
    _check_cut(chat_output(FAKE, is_forced=is_forced), text, length, cuts)


@settings(max_examples=120)
@given(
    text=bare_calls,
    length=st.integers(0, 600),
    cuts=st.lists(st.integers(0, 600), max_size=8),
    is_forced=st.booleans(),
)
def test_bare_calls_cut_anywhere_give_no_content(
    text: str, length: int, cuts: list[int], *, is_forced: bool
) -> None:
    """JSON without markers, one call after the other or an array, cut at any character: the same."""
    _check_cut(chat_output(BARE, has_bare_calls=True, is_forced=is_forced), text, length, cuts)


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "text", "calls"), SPELLINGS)
def test_other_spellings_cut_anywhere_give_no_content(
    name: str, text: str, calls: int, stride: int
) -> None:
    """Every spelling that mlx-lm reads, cut at every character, and behind another call at every one or fourth."""
    del calls
    output = chat_output(mlx_format(name))
    twice = f"{text}\n{text}"
    for length in (*range(len(text) + 1), *range(len(text) + 1, len(twice) + 1, stride)):
        read = read_answer(output, [twice[:length]], is_cut=True)
        assert read.content == "", twice[:length]
        assert read_answer(output, twice[:length], is_cut=True) == read


def test_whole_calls_before_a_cut_are_kept_where_nothing_ends_a_section() -> None:
    """Mistral's calls follow each other without an end: the whole ones are calls, the cut one is none."""
    whole = '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}'
    read = read_answer(chat_output(mlx_format("mistral")), [f"{whole}{whole[:-4]}"], is_cut=True)
    assert [(name, is_whole) for name, _, is_whole in read.calls] == [("get_weather", True)]
    assert read.content == ""


@settings(max_examples=80)
@given(
    text=marked_calls, length=st.integers(0, 600), lead=st.sampled_from(["Let me see.", "a < b"])
)
def test_text_before_a_cut_call_is_kept(text: str, length: int, lead: str) -> None:
    """What was said before is content; the beginning of a marker behind it may be text, and is kept."""
    beginning = text[:length]
    read = read_answer(_MARKED, [f"{lead}\n{beginning}"], is_cut=True)
    is_part_of_marker = len(beginning) < len(_MARKER)
    assert read.content == (f"{lead}\n{beginning}" if is_part_of_marker else lead)


@pytest.mark.parametrize("cut", ["a <", "a < b <tool", "<tool_call>no JSON", "<tool_call>[1, 2"])
def test_what_cannot_become_a_call_is_content_when_it_is_cut(cut: str) -> None:
    """In a free answer without a call nothing is lost that is no call for certain."""
    assert read_answer(_MARKED, [cut], is_cut=True).content == cut


@pytest.mark.parametrize(
    "cut",
    [
        '{"answer": 4',
        '{"answ',
        '[{"city": "Par',
        '{"name": "Alice',
        '{"name": "Alice", "age": 3',
        '{"name": {"first": "A',
        '{"type": "object", "properties": {"a',
        '{"id": 7, "title": "x',
        "[1, 2",
        "{}, {",
    ],
)
def test_json_answer_that_is_cut_is_content(cut: str) -> None:
    """JSON that cannot become a call of a known function comes out as far as it was written."""
    assert read_answer(chat_output(BARE, has_bare_calls=True), [cut], is_cut=True).content == cut


@pytest.mark.parametrize(
    "cut", ["<tool_call>no JSON", '<tool_call>{"name": "g", "arguments": {}} x']
)
def test_what_cannot_become_a_call_is_content_behind_a_call_too(cut: str) -> None:
    """It is known for text while it comes, so that a stream need not wait for the answer's end."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read_answer(_MARKED, [f"{call}{cut}"], is_cut=True).content == cut


def test_open_section_is_no_content_behind_a_call() -> None:
    """The beginning of a further call that the cut ended is nothing."""
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for begun in ("<tool_call>", '<tool_call>{"name": "g', '<tool_call>{"name": "f", "arg'):
        assert read_answer(_MARKED, [f"{call}{begun}"], is_cut=True).content == ""


@pytest.mark.parametrize("end", ['<tool_call>{"na', "<tool_", '<tool_call>{"name": "f"'])
def test_text_that_ended_itself_inside_a_call_is_content(end: str) -> None:
    """A model that ends its text inside a call has said just that; nothing was cut."""
    assert read_answer(_MARKED, [end]).content == end


def test_cut_call_in_thoughts_is_no_thought() -> None:
    """The beginning of a call inside thoughts is dropped as well, and the thoughts stay."""
    read = read_answer(_MARKED, ['<think>I call.\n<tool_call>\n{"name": "f", "arg'], is_cut=True)
    assert read == Read(reasoning="I call.", order="r")
