"""From Anthropic's messages to the messages that a chat template reads."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from machd.dialects.anthropic.turns import AnthropicMessageList, SystemContent, Turns, read_turns
from machd.errors import InvalidRequestError, UnsupportedParameterError

_CALL = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
_OTHER_CALL = {"type": "tool_use", "id": "t2", "name": "time", "input": {}}
_RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}
_OTHER_RESULT = {"type": "tool_result", "tool_use_id": "t2"}


def _turns(*messages: tuple[str, Any], system: object = None) -> Turns:
    listed = [{"role": role, "content": content} for role, content in messages]
    return read_turns(
        msgspec.json.decode(json.dumps(system), type=SystemContent | None),
        msgspec.json.decode(json.dumps(listed), type=AnthropicMessageList),
    )


def _rendered(*messages: tuple[str, Any], system: object = None) -> list[dict[str, object]]:
    return _turns(*messages, system=system).messages


def _text(text: str) -> dict[str, object]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize("system", ["be brief", [_text("be brief")]])
def test_the_system_prompt_comes_first(system: object) -> None:
    """It is a message of its own for templates, in both spellings."""
    assert _rendered(("user", "hi"), system=system) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


@pytest.mark.parametrize("system", [None, "", []])
def test_no_system_prompt_is_no_message(system: object) -> None:
    """Nothing said is nothing shown."""
    assert _rendered(("user", "hi"), system=system) == [{"role": "user", "content": "hi"}]


def test_blocks_of_a_user_are_lines() -> None:
    """Separate blocks do not run into each other; empty ones are nothing."""
    content = [_text("a"), _text(""), _text("b")]
    assert _rendered(("user", content)) == [{"role": "user", "content": "a\nb"}]


def test_messages_of_one_role_are_one_turn() -> None:
    """Consecutive messages of a role are merged, the assistant's without anything between."""
    assert _rendered(
        ("user", "a"),
        ("user", [_text("b")]),
        ("assistant", "c"),
        ("assistant", [_text("d")]),
        ("user", "e"),
    ) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "cd"},
        {"role": "user", "content": "e"},
    ]


def test_a_system_message_in_the_middle_stays_there() -> None:
    """It is shown where it was said, and one at the start joins the system prompt."""
    assert _rendered(("system", "b"), ("user", "c"), ("system", "d"), system="a") == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
    ]


def test_a_round_of_tools() -> None:
    """Calls, results in the order of the results, then what the user says; thoughts go along."""
    assert _rendered(
        ("user", "hi"),
        (
            "assistant",
            [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                _text("let me see"),
                _CALL,
                _OTHER_CALL,
            ],
        ),
        ("user", [_text("and?"), {**_OTHER_RESULT, "content": [_text("9"), _text("am")]}, _RESULT]),
    ) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "let me see",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Paris"}},
                },
                {
                    "id": "t2",
                    "type": "function",
                    "function": {"name": "time", "arguments": {}},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "t2", "name": "time", "content": "9\nam"},
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "sunny"},
        {"role": "user", "content": "and?"},
    ]


@pytest.mark.parametrize(
    ("blocks", "content"),
    [
        ([_text("say"), _CALL, _text("mid"), _OTHER_CALL, _text("end")], "say\nmid\nend"),
        ([_text("say "), _CALL, _text("mid"), _OTHER_CALL, _text("\n\nend")], "say mid\n\nend"),
        ([_text("so"), _text("me"), _CALL, _OTHER_CALL, _text("")], "some"),
        ([_CALL, _text("so"), _OTHER_CALL], "so"),
    ],
)
def test_texts_around_a_call_do_not_grow_together(
    blocks: list[dict[str, object]], content: str
) -> None:
    """Blocks are pieces of one text, and a call between two of them leaves a gap."""
    rendered = _rendered(("user", "hi"), ("assistant", blocks), ("user", [_RESULT, _OTHER_RESULT]))
    assert rendered[1]["content"] == content


def test_inputs_of_all_calls_share_a_bound() -> None:
    """Many calls of moderate size are as much work as one that is too large."""
    calls = [{**_CALL, "id": str(index), "input": {"a": [{}] * 9000}} for index in range(3)]
    with pytest.raises(InvalidRequestError) as error:
        _turns(("user", "hi"), ("assistant", calls))
    assert error.value.param == "messages[1].content[2].input"


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": []}, ""),
        ({"content": "no", "is_error": False}, "no"),
        ({"content": "no", "is_error": True}, "Error: no"),
    ],
)
def test_results(fields: dict[str, object], content: str) -> None:
    """A result may say nothing, and a failed call says that it failed; no user message follows."""
    rendered = _rendered(
        ("user", "hi"),
        ("assistant", [_OTHER_CALL]),
        ("user", [{**_OTHER_RESULT, **fields}]),
    )
    assert rendered[2:] == [
        {"role": "tool", "tool_call_id": "t2", "name": "time", "content": content}
    ]


def test_an_id_may_come_again_in_a_later_turn() -> None:
    """A result answers the message before it and no other."""
    rendered = _rendered(
        ("user", "hi"),
        ("assistant", [_CALL]),
        ("user", [_RESULT]),
        ("assistant", [{**_CALL, "name": "other"}]),
        ("user", [_RESULT]),
    )
    assert [one.get("name") for one in rendered if one["role"] == "tool"] == ["weather", "other"]


def test_a_final_message_of_the_assistant_is_continued() -> None:
    """The last message is the beginning of the answer, thoughts of its own included."""
    turns = _turns(("user", "hi"), ("assistant", [_text("We"), _text("ll")]))
    assert turns.continues_final_message
    assert turns.messages[-1] == {"role": "assistant", "content": "Well"}


@pytest.mark.parametrize("content", ["", [], [_text("")], [{"type": "redacted_thinking"}]])
def test_an_empty_beginning_is_none(content: object) -> None:
    """A final message without text is as good as none."""
    turns = _turns(("user", "hi"), ("assistant", content))
    assert turns == Turns([{"role": "user", "content": "hi"}], continues_final_message=False)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([("assistant", "a"), ("user", "b")], "messages[0].role"),
        ([("system", "x"), ("assistant", "a")], "messages[1].role"),
        ([("system", "x")], "messages"),
        ([("user", [_RESULT])], "messages[0]"),
        ([("user", "a"), ("assistant", "b"), ("user", [_RESULT])], "messages[2]"),
        ([("user", "a"), ("assistant", [_CALL]), ("user", "b")], "messages[2]"),
        ([("user", "a"), ("assistant", [_CALL]), ("user", [_OTHER_RESULT])], "messages[2]"),
        ([("user", "a"), ("assistant", [_CALL]), ("user", [_RESULT, _RESULT])], "messages[2]"),
        ([("user", "a"), ("assistant", [_CALL, _OTHER_CALL]), ("user", [_RESULT])], "messages[2]"),
        ([("user", "a"), ("assistant", [_CALL, _CALL]), ("user", [_RESULT])], "messages[1]"),
        ([("user", "a"), ("assistant", [_text("b"), _CALL])], "messages"),
        ([("user", "a"), ("assistant", [_CALL]), ("system", "b"), ("assistant", "c")],
         "messages[3]"),
        ([("user", "a"), ("assistant", "b ")], "messages[1].content"),
        ([("user", "a"), ("assistant", "b\n")], "messages[1].content"),
        ([("user", "a"), ("assistant", [{"type": "thinking", "thinking": "b"}])],
         "messages[1].content"),
        ([("user", [_CALL])], "messages[0].content[0].type"),
        ([("user", [{"type": "thinking", "thinking": ""}])], "messages[0].content[0].type"),
        ([("user", "a"), ("assistant", [_RESULT])], "messages[1].content[0].type"),
        ([("system", [_RESULT])], "messages[0].content[0].type"),
    ],
)  # fmt: skip
def test_an_order_that_makes_no_sense_is_refused(
    messages: list[tuple[str, object]], param: str
) -> None:
    """Wrong roles, results without calls and calls without results are told by their place."""
    with pytest.raises(InvalidRequestError) as error:
        _turns(*messages)
    assert error.value.param == param
    assert error.value.code == "invalid_request"


_PDF = {"source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "the body"},
        {"type": "content", "content": "the body"},
        {"type": "content", "content": [{"type": "text", "text": "the body"}]},
    ],
)
def test_document_of_text_is_read(source: object) -> None:
    """A document's title, context and text stand in the message, inside results too."""
    document = {"type": "document", "source": source, "title": "T", "context": "C"}
    turns = _turns(("user", [document, _text("a")]))
    assert turns.messages[0]["content"] == "T\nC\nthe body\na"
    result = {**_RESULT, "content": [document]}
    turns = _turns(("user", "a"), ("assistant", [_CALL]), ("user", [result]))
    assert turns.messages[-1]["content"] == "T\nC\nthe body"


@pytest.mark.parametrize("kind", ["document", "search_result"])
def test_what_is_neither_text_nor_image_is_refused_by_its_place(kind: str) -> None:
    """Documents that are no text are refused where they stand, inside results too."""
    with pytest.raises(UnsupportedParameterError) as error:
        _turns(("user", [_text("a"), {"type": kind, **_PDF}]))
    assert error.value.param == "messages[0].content[1].type"
    with pytest.raises(UnsupportedParameterError) as error:
        _turns(
            ("user", "a"),
            ("assistant", [_CALL]),
            ("user", [{**_RESULT, "content": [{"type": kind, **_PDF}]}]),
        )
    assert error.value.param == "messages[2].content[0].content[0].type"
    assert kind in error.value.message
