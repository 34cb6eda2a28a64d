"""Calls in every format that mlx-lm reads, as templates write them and with the slips of models."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clients.answers import TOOLS, Read, chat_output, mlx_format, read_answer
from support.clients.call_spellings import SPELLED, Call, Spelling

from machd.reading.chat_output import ChatOutput

_WORDS = ["Paris", " ", "\n", '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", "<", "é"]
_EVERY = pytest.mark.parametrize("kind", SPELLED)


def _output(kind: str) -> ChatOutput:
    return chat_output(mlx_format(kind.split(maxsplit=1)[0]))


def _texts(spelling: Spelling) -> st.SearchStrategy[str]:
    """Values with whatever is hard to read in them, markers of calls among it."""
    hard = [one for one in (spelling.start, spelling.end, "<tool_call>", "</function>") if one]
    words = st.sampled_from([*_WORDS, *hard])
    return (
        st.lists(words, max_size=6)
        .map(lambda parts: f"a{''.join(parts)}b")
        .filter(lambda text: not any(one in text for one in spelling.forbidden))
    )


def _calls(spelling: Spelling, *, min_size: int = 1) -> st.SearchStrategy[list[Call]]:
    weather = st.fixed_dictionaries(
        {}, optional={"city": _texts(spelling), "days": st.integers(-99, 99)}
    ).map(lambda arguments: ("get_weather", arguments))
    number = st.fixed_dictionaries({"a": st.integers(-9, 9)}).map(lambda given: ("f", given))
    return st.lists(st.one_of(weather, number), min_size=min_size, max_size=3)


def _half(spelling: Spelling, call: Call) -> str:
    written = spelling.write([call])
    return written[: len(written) // 2]


def _found(read: Read) -> list[Call]:
    assert all(is_whole for *_, is_whole in read.calls), read
    return [(name, json.loads(arguments)) for name, arguments, _ in read.calls]


def _read(output: ChatOutput, text: str, *, streams: bool = True) -> Read:
    """Read an answer each token alone and at once: it has to be the same."""
    read = read_answer(output, text, streams=streams)
    assert read == read_answer(output, [text], streams=streams)
    return read


def _read_both(output: ChatOutput, text: str) -> Read:
    """Read an answer for a stream and whole, in which every call is whole: it has to be the same."""
    read = _read(output, text)
    assert read == _read(output, text, streams=False)
    return read


def test_every_parser_of_mlx_lm_has_a_spelling() -> None:
    """A new mlx-lm with a new format fails here, so that it gets its grammar."""
    import mlx_lm.tool_parsers  # noqa: PLC0415 - only here

    names = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    # Laguna's is that of GLM.
    assert names - {"laguna"} == {kind.split(maxsplit=1)[0] for kind in SPELLED}


@_EVERY
@settings(max_examples=8)
@given(data=st.data())
def test_calls_are_read_as_templates_write_them(kind: str, data: st.DataObject) -> None:
    """Whatever their values hold: the calls, the thoughts before them, and the text around them."""
    spelling = SPELLED[kind]
    calls = data.draw(_calls(spelling))
    read = _read_both(_output(kind), f"<think>hm</think>Look:\n{spelling.section(calls)}\n")
    assert (read.content, read.reasoning, _found(read)) == ("Look:", "hm", calls)


@_EVERY
@settings(max_examples=8)
@given(data=st.data())
def test_plain_values_are_what_mlx_lm_reads(kind: str, data: st.DataObject) -> None:
    """Where values hold no marks of the format, mlx-lm's own parser finds the same."""
    spelling = SPELLED[kind]
    call = data.draw(
        st.fixed_dictionaries(
            {"city": st.sampled_from(["Paris", "New York", "1"]), "days": st.integers(0, 9)}
        )
    )
    written = spelling.section([("get_weather", call)])
    inner = written.removeprefix(spelling.start).removesuffix(spelling.end)
    if kind == "mistral with ids":
        inner = inner.replace("[CALL_ID]Ab1cdEfgh", "")  # mlx-lm reads none of these
    parsed = mlx_format(kind.split(maxsplit=1)[0]).parse(inner, list(TOOLS))
    (parsed,) = parsed if isinstance(parsed, list) else [parsed]
    assert isinstance(parsed, Mapping)
    read = _read_both(_output(kind), written)
    assert _found(read) == [(parsed["name"], parsed["arguments"])]


@_EVERY
@settings(max_examples=8)
@given(data=st.data())
def test_thought_that_mentions_a_marker_loses_no_call(kind: str, data: st.DataObject) -> None:
    """The mention is a thought as it was written, and the call behind the thoughts is a call."""
    spelling = SPELLED[kind]
    calls = data.draw(_calls(spelling))
    start, end = spelling.start, spelling.end
    mention = data.draw(
        st.sampled_from(
            [
                f"I write {start} now.",
                f"Between {start} and {end or 'its end'}, twice: {start}.",
                f"{start}{spelling.write([('unknown', {'a': 1})])}{end} is not there.",
                f"{start}{_half(spelling, ('f', {'a': 1}))} {start} {start}",
            ]
        )
    )
    read = _read_both(_output(kind), f"<think>{mention}</think>\n{spelling.section(calls)}")
    assert (read.reasoning, read.content, _found(read)) == (mention, "", calls)


@_EVERY
@settings(max_examples=8)
@given(data=st.data())
def test_text_that_mentions_a_marker_loses_no_call(kind: str, data: st.DataObject) -> None:
    """The same in the answer's text, before the call and behind it."""
    spelling = SPELLED[kind]
    calls = data.draw(_calls(spelling))
    mention = f"With {spelling.start} one calls:"
    section = spelling.section(calls)
    read = _read_both(_output(kind), f"{mention}\n{section}\nThat was {spelling.start} it.")
    assert read.content.split("\n")[0].startswith(mention)
    assert read.content.endswith(f"That was {spelling.start} it.")
    assert _found(read) == calls


@_EVERY
@settings(max_examples=8)
@given(data=st.data())
def test_unknown_function_is_text(kind: str, data: st.DataObject) -> None:
    """A call that no tool answers to comes out as it was written, and the next one is a call."""
    spelling = SPELLED[kind]
    calls = data.draw(_calls(spelling))
    unknown = f"{spelling.start}{spelling.write([('unknown', {'a': 1})])}{spelling.end}"
    read = _read_both(_output(kind), unknown)
    assert (read.content, read.calls) == (unknown, [])
    read = _read_both(_output(kind), f"{unknown}{spelling.section(calls)}")
    assert (read.content.rstrip(), _found(read)) == (unknown.rstrip(), calls)


@_EVERY
@settings(max_examples=8)
@given(data=st.data())
def test_call_that_the_model_left_unfinished_is_text(kind: str, data: st.DataObject) -> None:
    """A whole answer that ends anywhere in a section: calls that are whole, and else its own text."""
    spelling = SPELLED[kind]
    if not spelling.ends_itself:  # a closing marker in a value that never ends may have ended it
        spelling = replace(spelling, forbidden=(*spelling.forbidden, spelling.end))
    calls = data.draw(_calls(spelling))
    text = spelling.section(calls)
    text = text[: data.draw(st.integers(0, len(text)))]
    read = _read(_output(kind), text, streams=False)
    found = _found(read)
    assert found == calls[: len(found)]
    if not found:
        assert read.content == text
    streamed = _read(_output(kind), text)
    whole = [call for call in streamed.calls if call[2]]
    assert whole == read.calls


@_EVERY
@settings(max_examples=8)
@given(data=st.data())
def test_no_damage_makes_a_call_of_what_was_not_written(kind: str, data: st.DataObject) -> None:
    """A piece cut out, doubled or put in: every letter of the city is in a call or in the text."""
    spelling = SPELLED[kind]
    text = spelling.section(data.draw(_calls(spelling)))
    at = data.draw(st.integers(0, len(text)))
    until = min(len(text), at + data.draw(st.integers(0, 12)))
    put = data.draw(
        st.sampled_from(["", "}", '"', "\n", "text", text[at:until] * 2, spelling.start])
    )
    damaged = text[:at] + put + text[until:]
    read = _read(_output(kind), damaged, streams=False)
    _read(_output(kind), damaged)
    for name, arguments, is_whole in read.calls:
        assert is_whole
        assert name in {"f", "get_weather"}
        assert isinstance(json.loads(arguments), dict)
    if not read.calls:
        assert read.content == damaged
    written = read.content + "".join(arguments for _, arguments, _ in read.calls)
    assert written.count("Paris") >= damaged.count("Paris") or len(set(_keys(damaged))) < len(
        _keys(damaged)
    )


def _keys(text: str) -> Sequence[str]:
    """Occurrences of the key: of a key that is written twice, the last value counts."""
    return ["city"] * text.count("city")


@pytest.mark.parametrize("kind", [one for one, spelling in SPELLED.items() if spelling.end])
def test_missing_closing_marker(kind: str) -> None:
    """A call that has its own end is whole without the section's; of the others, nothing tells."""
    spelling = SPELLED[kind]
    call: Call = ("f", {"a": 1})
    text = spelling.start + spelling.write([call])
    read = _read_both(_output(kind), text)
    if spelling.ends_itself:
        assert (_found(read), read.content) == ([call], "")
    else:
        assert (read.calls, read.content) == ([], text)


@pytest.mark.parametrize("kind", [one for one, spelling in SPELLED.items() if spelling.value_end])
@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_missing_end_of_a_value(kind: str, missing: int, count: int) -> None:
    """The value ends where the next one begins, or with its function: nothing is dropped."""
    spelling = SPELLED[kind]
    call: Call = ("get_weather", {"city": "Paris", "days": 3})
    written = spelling.write([call]).split(spelling.value_end)
    between = [spelling.value_end, spelling.value_end]
    between[missing] = ""
    damaged = written[0] + between[0] + written[1] + between[1] + written[2]
    text = f"{spelling.start}{damaged}{spelling.end}" + spelling.section([call]) * (count - 1)
    read = _read_both(_output(kind), text)
    assert (_found(read), read.content) == ([call] * count, "")


@pytest.mark.parametrize(
    ("kind", "text", "names"),
    [
        (
            "qwen3_coder",
            "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            ["f"],
        ),
        (
            "qwen3_coder",
            "I call.\n<function=f>\n</function>\n<function=f>\n</function>\n</tool_call>\n",
            ["f", "f"],
        ),
        (
            "qwen3_coder",
            "<function=f></function><tool_call><function=f></function></tool_call>",
            ["f", "f"],
        ),
        ("minimax_m2", '<invoke name="f">\n</invoke>\n</minimax:tool_call>', ["f"]),
        (
            "kimi_k2",
            f"{SPELLED['kimi_k2'].write([('f', {})])}<|tool_calls_section_end|>",
            ["f"],
        ),
    ],
)
def test_call_without_the_opening_marker(kind: str, text: str, names: list[str]) -> None:
    """It is a call, and the closing marker that stands behind it is no text."""
    read = _read_both(_output(kind), text)
    assert [name for name, _ in _found(read)] == names
    assert read.content in ("", "I call.")


@pytest.mark.parametrize(
    "text",
    [
        "Write <function=name> to define one.",
        "<function=g>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<function=f is how it begins",
    ],
)
def test_mentioned_function_is_text(text: str) -> None:
    """Without the marker around it, only a known function's name begins a call."""
    read = _read_both(_output("qwen3_coder"), text)
    assert (read.content, read.calls) == (text, [])


def test_unreadable_json_is_content_of_a_whole_answer() -> None:
    """In a whole answer it is content; a stream has sent its beginning, so there the call stays without an end."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1, b: 2}}\n</tool_call>'
    whole = read_answer(_output("json_tools"), text, streams=False)
    assert (whole.content, whole.calls) == (text, [])
    streamed = read_answer(_output("json_tools"), text)
    assert [call[::2] for call in streamed.calls] == [("f", False)]


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "get_weather", "}arguments": {"city": "Paris"}}',
        '{"name": "get_weather", "args": {"city": "Paris"}}',
        '{"function": {"name": "get_weather", "input": {"city": "Paris"}}}',
    ],
)
def test_arguments_under_another_key_are_not_dropped(call: str) -> None:
    """A call without its arguments would be another call: it is text."""
    text = f"[TOOL_CALLS][{call}]"
    read = _read_both(_output("mistral as JSON"), text)
    assert (read.content, read.calls) == (text, [])


def test_cut_call_shows_its_beginning_in_a_whole_answer_too() -> None:
    """Where ``max_tokens`` ended it, as in a stream."""
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 12'
    whole = read_answer(_output("json_tools"), text, streams=False, is_cut=True)
    assert whole == read_answer(_output("json_tools"), text, is_cut=True)
    assert whole.calls == [("f", '{"a": ', False)]


def test_mention_is_shown_while_it_comes() -> None:
    """A stream need not wait for the end of an answer that only mentions a marker."""
    for kind, spelling in SPELLED.items():
        parser = _output(kind).parser()
        pieces = parser.push(f"Use {spelling.start} as shown. More")
        assert "".join(getattr(one, "text", "") for one in pieces).endswith("shown. More"), kind


@pytest.mark.parametrize("kind", SPELLED)
def test_markers_without_calls_are_text(kind: str) -> None:
    """Thousands of opening markers, and of calls without an end: nothing is lost, and it comes to an end."""
    spelling = SPELLED[kind]
    begun = spelling.start + _half(spelling, ("get_weather", {"city": "Paris"}))
    for text in (spelling.start * 4000, begun * 1500):
        read = read_answer(_output(kind), [text], streams=False)
        assert (read.content, read.calls) == (text, [])


_GENERATED = (
    test_calls_are_read_as_templates_write_them,
    test_thought_that_mentions_a_marker_loses_no_call,
    test_text_that_mentions_a_marker_loses_no_call,
    test_unknown_function_is_text,
    test_call_that_the_model_left_unfinished_is_text,
    test_no_damage_makes_a_call_of_what_was_not_written,
)


@pytest.mark.long
@pytest.mark.parametrize("check", _GENERATED, ids=lambda check: check.__name__)
@_EVERY
def test_every_format_at_length(kind: str, check: Any) -> None:
    """The properties above, with more drawn texts."""
    settings(max_examples=100)(given(data=st.data())(check.hypothesis.inner_test))(kind=kind)
