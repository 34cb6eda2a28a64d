"""Pieces of output become a message, and the deltas that it grows by."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from machd.dialects.chat.answer import GrowingMessage
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
    message = GrowingMessage()
    message.push(pieces)
    return _wire(message.finish())


def _deltas(*pieces: OutputPiece) -> Any:
    return [_wire(delta) for delta in GrowingMessage().push(pieces)]


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
    message = GrowingMessage()
    message.push(_CALL[:1])
    assert _wire(message.push(_CALL[1:3])) == [
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}
    ]
    assert message.push(_CALL[3:]) == []
    assert message.push([]) == []


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


@pytest.mark.parametrize("piece", [Content("x"), Reasoning("x"), _CALL[0]])
def test_a_delta_leaves_out_what_is_not_news(piece: OutputPiece) -> None:
    """No field says null where nothing was said."""
    (delta,) = GrowingMessage().push([piece])
    assert delta.role is UNSET
    assert all(value is not None for value in msgspec.structs.asdict(delta).values())
