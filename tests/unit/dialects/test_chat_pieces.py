"""Pieces of output become a message or deltas, and both say the same."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from openai.lib.streaming._deltas import accumulate_delta

from machd.dialects.chat.answer import ContentGaps, chat_deltas, chat_message
from machd.reading.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

_CALL: list[OutputPiece] = [
    ToolCallStart(0, "call_a", "add"),
    ToolCallArguments(0, '{"a"'),
    ToolCallArguments(0, ": 1}"),
    ToolCallEnd(0),
]


def _wire(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


def _message(*pieces: OutputPiece) -> Any:
    return _wire(chat_message(pieces))


def _deltas(*pieces: OutputPiece) -> Any:
    return [_wire(delta) for delta in chat_deltas(pieces)]


def test_a_plain_message_has_no_other_fields() -> None:
    """Text alone looks as it always did."""
    expected = {"role": "assistant", "content": "ab", "refusal": None}
    assert _message(Content("a"), Content("b")) == expected
    assert _message() == {**expected, "content": ""}


def test_a_message_of_calls_alone_has_null_content() -> None:
    """OpenAI's clients take null for nothing said."""
    message = _message(*_CALL, ToolCallStart(1, "call_b", "say"), ToolCallArguments(1, "{"))
    assert message["content"] is None
    assert message["tool_calls"] == [
        {
            "id": "call_a",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 1}'},
        },
        {"id": "call_b", "type": "function", "function": {"name": "say", "arguments": "{"}},
    ]
    assert _message(Content("x"), *_CALL)["content"] == "x"


def test_thoughts_have_two_names() -> None:
    """Clients look for one or the other; both hold the same text."""
    message = _message(Reasoning("h"), Reasoning("m"), Content("so"))
    assert message["reasoning_content"] == message["reasoning"] == "hm"
    assert message["content"] == "so"
    assert _deltas(Reasoning("hm")) == [{"reasoning_content": "hm", "reasoning": "hm"}]


def test_a_delta_holds_one_kind_of_news() -> None:
    """Thoughts, text and each call come apart and in order; a call's name comes first."""
    assert _deltas(
        Reasoning("h"),
        Reasoning("m"),
        Content("so"),
        *_CALL,
        ToolCallStart(1, "call_b", "say"),
    ) == [
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"content": "so"},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call_a",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1}'},
                }
            ]
        },
        {
            "tool_calls": [
                {
                    "index": 1,
                    "id": "call_b",
                    "type": "function",
                    "function": {"name": "say", "arguments": ""},
                }
            ]
        },
    ]


def test_later_arguments_name_only_their_call() -> None:
    """The name and the id are said once; the end of a call is no news."""
    assert _deltas(ToolCallArguments(2, "1"), ToolCallArguments(2, "}"), ToolCallEnd(2)) == [
        {"tool_calls": [{"index": 2, "function": {"arguments": "1}"}}]}
    ]
    assert _deltas(ToolCallEnd(2)) == []
    assert _deltas() == []


@pytest.mark.parametrize(
    ("texts", "content"),
    [(("say", "mid", "end"), "say\nmid\nend"), (("say ", "mid", "\tend"), "say mid\tend")],
)
def test_texts_around_a_call_do_not_grow_together(texts: tuple[str, ...], content: str) -> None:
    """One gap is kept where a call stood; there is none before the first text or after the last."""
    first, second, third = (Content(text) for text in texts)
    assert _message(first, *_CALL, second, *_CALL, third, *_CALL)["content"] == content
    assert _message(*_CALL, first)["content"] == texts[0]
    assert _message(Content("so"), Reasoning("hm"), Content("me"))["content"] == "some"


@st.composite
def _outputs(draw: st.DrawFn) -> list[OutputPiece]:
    """Pieces as a parser gives them: calls whole and in order, text between them."""
    pieces: list[OutputPiece] = []
    text = st.text(min_size=1, max_size=4)
    calls = 0
    for kind in draw(st.lists(st.sampled_from("rct"), max_size=8)):
        if kind == "r":
            pieces.append(Reasoning(draw(text)))
        elif kind == "c":
            pieces.append(Content(draw(text)))
        else:
            pieces.append(ToolCallStart(calls, f"call_{calls}", f"f{calls}"))
            pieces += [ToolCallArguments(calls, one) for one in draw(st.lists(text, max_size=3))]
            pieces.append(ToolCallEnd(calls))
            calls += 1
    return pieces


@given(pieces=_outputs(), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_deltas_add_up_to_the_message(pieces: list[OutputPiece], cuts: list[int]) -> None:
    """However the pieces arrive, OpenAI's own accumulator makes the whole message of the deltas."""
    edges = [0, *sorted(min(cut, len(pieces)) for cut in cuts), len(pieces)]
    seen: dict[object, object] = {"role": "assistant", "content": ""}
    gaps = ContentGaps()
    for start, end in pairwise(edges):
        for delta in _deltas(*gaps.filled(pieces[start:end])):
            assert delta
            seen = accumulate_delta(seen, delta)
    message = _message(*pieces)
    assert seen["content"] == (message["content"] or "")
    assert seen.get("reasoning") == message.get("reasoning")
    calls: Any = seen.get("tool_calls", [])
    assert [{k: v for k, v in one.items() if k != "index"} for one in calls] == message.get(
        "tool_calls", []
    )
    assert [one["index"] for one in calls] == list(range(len(calls)))


@pytest.mark.parametrize("piece", [Content("x"), Reasoning("x"), ToolCallArguments(0, "x")])
def test_a_delta_leaves_out_what_is_not_news(piece: OutputPiece) -> None:
    """No field says null where nothing was said."""
    (delta,) = chat_deltas([piece])
    assert delta.role is UNSET
    assert all(value is not None for value in msgspec.structs.asdict(delta).values())
