"""System messages reach the model whatever its chat template makes of them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clients.role_templates import ROLE_TEMPLATES
from support.engines.fake_engine import FakeEngine
from support.engines.tiny_models import tiny_tokenizer

from machd.dialects.anthropic.request import MessagesRequest
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.ollama.request import OllamaChatRequest
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.wire.decoding import decode_body
from machd.engine.fake.tokenizer import FakeTokenizer
from machd.engine.protocol.chat_format import ChatFormat, SystemMessages
from machd.engine.tokenizer.tokenizer import MlxTokenizer
from machd.reading.conversation import prepare_conversation
from machd.reading.system_messages import merge_opening, place_system_messages
from machd.request.conversation import Conversation

Message = dict[str, object]
USER: Message = {"role": "user", "content": "u"}
FIRST = ChatFormat(system_messages=SystemMessages.FIRST)


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


@functools.cache
def _tokenizer(kind: str) -> MlxTokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.wrapped._tokenizer.chat_template = ROLE_TEMPLATES[kind]
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "place", "user_after_tool"),
    [
        ("anywhere", SystemMessages.ANYWHERE, True),
        ("first", SystemMessages.FIRST, True),
        ("first, silent", SystemMessages.FIRST, True),
        ("alternating", SystemMessages.FIRST, False),
        ("none", SystemMessages.NONE, True),
    ],
)
def test_place_is_found_by_trying_the_template(
    kind: str, place: SystemMessages, *, user_after_tool: bool
) -> None:
    """What it refuses or leaves out tells."""
    chat_format = _tokenizer(kind).chat_format
    assert chat_format.system_messages is place
    assert chat_format.takes_user_after_tool is user_after_tool


@pytest.mark.parametrize("kind", ROLE_TEMPLATES)
@settings(max_examples=40)
@given(data=st.data())
def test_system_messages_anywhere_reach_the_prompt_in_order(kind: str, data: st.DataObject) -> None:
    """Conversations that a template takes without system messages, it takes with them; no word is lost."""
    turns = data.draw(st.lists(st.sampled_from(["", "call", "calls"]), max_size=3))
    if kind == "none":
        turns = ["" for _ in turns]
    messages: list[Message] = []
    count = iter(range(1000))

    def say(role: str, **fields: object) -> None:
        messages.extend(
            system(f"w{next(count)}.") for _ in range(data.draw(st.sampled_from([0, 0, 1, 2])))
        )
        messages.append({"role": role, "content": f"w{next(count)}.", **fields})

    say("user")
    for turn in turns:
        ids = ["abcdefgh1", "abcdefgh2"][: {"": 0, "call": 1, "calls": 2}[turn]]
        if ids:
            calls = [
                {"id": one, "type": "function", "function": {"name": "f", "arguments": {}}}
                for one in ids
            ]
            say("assistant", tool_calls=calls)
        for one in ids:
            say("tool", tool_call_id=one, name="f")
        say("assistant")
        say("user")
    messages.extend(system(f"w{next(count)}.") for _ in range(data.draw(st.integers(0, 2))))
    tokenizer = _tokenizer(kind)
    placed = place_system_messages(merge_opening(messages), tokenizer.chat_format)
    text = tokenizer.render_chat(placed)
    words = re.findall(r"w\d+\.", text)
    assert sorted(words) == sorted(f"w{number}." for number in range(next(count)))
    others = [str(one["content"]) for one in messages if one["role"] != "system"]
    assert [word for word in words if word in others] == others


def test_opening_messages_become_one() -> None:
    """An empty line stands between them, and nothing behind them changes."""
    merged = merge_opening([system("a"), system(""), system("b"), USER, system("c")])
    assert merged == [system("a\n\nb"), USER, system("c")]
    assert merge_opening([USER, system("a"), system("b")])[0] == USER
    assert merge_opening([]) == []


def test_later_message_joins_the_users_turn_beside_it() -> None:
    """It is marked as the system's, and stands where it stood."""
    answer: Message = {"role": "assistant", "content": "a"}
    placed = place_system_messages([system("x"), USER, answer, system("y"), USER], FIRST)
    assert placed == [
        system("x"),
        USER,
        answer,
        {"role": "user", "content": "<system>\ny\n</system>\n\nu"},
    ]
    placed = place_system_messages([USER, system("y")], FIRST)
    assert placed == [{"role": "user", "content": "u\n\n<system>\ny\n</system>"}]
    placed = place_system_messages([USER, answer, system("y"), answer], FIRST)
    assert placed[2] == {"role": "user", "content": "<system>\ny\n</system>"}


def test_later_message_goes_behind_the_results_of_calls() -> None:
    """Nothing stands between a call and its results."""
    call: Message = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    result: Message = {"role": "tool", "content": "r"}
    placed = place_system_messages([USER, call, system("y"), result, system("z"), result], FIRST)
    marked = "<system>\ny\n</system>\n\n<system>\nz\n</system>"
    assert placed == [USER, call, result, result, {"role": "user", "content": marked}]
    strict = ChatFormat(system_messages=SystemMessages.FIRST, takes_user_after_tool=False)
    placed = place_system_messages([USER, call, system("y"), result], strict)
    assert placed == [USER, call, {"role": "tool", "content": "r\n\n<system>\ny\n</system>"}]


def test_message_joins_a_turn_with_images() -> None:
    """Its text becomes a part, before or behind the others."""
    parts = [{"type": "image"}, {"type": "text", "text": "u"}]
    cases: list[tuple[list[Message], int]] = [
        ([{"role": "user", "content": parts}, system("y")], -1),
        ([system("x"), system("y"), {"role": "user", "content": parts}], 0),
    ]
    for messages, index in cases:
        chat_format = ChatFormat(system_messages=SystemMessages.NONE)
        (placed,) = place_system_messages(messages, chat_format)
        content = placed["content"]
        assert isinstance(content, list)
        assert "<system>\ny\n</system>" in content[index]["text"]
        assert len(content) == 3


class _FirstOnly(FakeTokenizer):
    """The fake's lines, of a template that takes one system message in front."""

    @property
    def chat_format(self) -> ChatFormat:
        return replace(super().chat_format, system_messages=SystemMessages.FIRST)


@dataclass
class _Engine:
    tokenizer: _FirstOnly
    model = FakeEngine().model
    media = None


def _chat() -> Conversation:
    roles = ("system", "developer", "user", "assistant", "system", "user")
    messages = [{"role": role, "content": f"{index}."} for index, role in enumerate(roles)]
    body = {"model": "m", "messages": messages}
    return decode_body(json.dumps(body).encode(), ChatCompletionRequest).checked().conversation()


def _responses() -> Conversation:
    roles = ("developer", "user", "assistant", "developer", "user")
    items = [{"role": role, "content": f"{index}."} for index, role in enumerate(roles, 1)]
    body = {"model": "m", "instructions": "0.", "input": items}
    request = decode_body(json.dumps(body).encode(), ResponsesRequest).checked()
    return request.continued(request.chain(previous=(), referenced={}))


def _anthropic() -> Conversation:
    roles = ("system", "user", "assistant", "system", "user")
    messages = [{"role": role, "content": f"{index}."} for index, role in enumerate(roles, 1)]
    body = {"model": "m", "max_tokens": 1, "system": "0.", "messages": messages}
    return decode_body(json.dumps(body).encode(), MessagesRequest).checked().conversation()


def _ollama() -> Conversation:
    roles = ("system", "system", "user", "assistant", "system", "user")
    messages = [{"role": role, "content": f"{index}."} for index, role in enumerate(roles)]
    body = {"model": "m", "messages": messages}
    return decode_body(json.dumps(body).encode(), OllamaChatRequest).checked().conversation()


@pytest.mark.parametrize("ask", [_chat, _responses, _anthropic, _ollama])
def test_every_dialect_puts_system_messages_where_the_template_takes_them(
    ask: Callable[[], Conversation],
) -> None:
    """Two in front are one, and one behind is marked in the user's turn."""
    prepared = prepare_conversation(ask(), _Engine(_FirstOnly()))  # type: ignore[arg-type]
    text = bytes(prepared.prompt).decode()
    marked = "user: <system>\n4.\n</system>\n\n5.\n"
    assert re.sub(r"0\.\n+1\.", "0 and 1", text) == (
        f"system: 0 and 1\nuser: 2.\nassistant: 3.\n{marked}assistant: "
    )


def test_developer_message_between_a_call_and_its_output_is_taken() -> None:
    """Responses take it as chat completions do; it goes behind the output."""
    items: list[object] = [
        {"role": "user", "content": "u"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"role": "developer", "content": "y"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
    ]
    body = json.dumps({"model": "m", "input": items}).encode()
    request = decode_body(body, ResponsesRequest).checked()
    messages = request.continued(request.chain(previous=(), referenced={})).messages
    placed = place_system_messages(merge_opening(messages), FIRST)
    assert [one["role"] for one in placed] == ["user", "assistant", "tool", "user"]


def test_a_system_message_between_two_turns_of_the_user_makes_them_one() -> None:
    """Templates that want roles to alternate refuse two turns in a row; an empty message adds nothing."""
    parts: Message = {"role": "user", "content": [{"type": "image"}]}
    placed = place_system_messages([USER, system("s"), USER], FIRST)
    assert placed == [{"role": "user", "content": "u\n\n<system>\ns\n</system>\n\nu"}]
    (whole,) = place_system_messages([parts, system("s"), parts], FIRST)
    kinds = [one["type"] for one in whole["content"]]  # type: ignore[attr-defined]
    assert kinds == ["image", "text", "text", "image"]
    assert place_system_messages([USER, system("")], FIRST) == [USER]
