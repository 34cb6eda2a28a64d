"""What requests say of the prefix cache, in every dialect; and an operator's prompts to warm."""

from __future__ import annotations

import json

import msgspec
import pytest

from machd.admin.warming import MAX_WARM_PROMPTS, WarmPrompt, WarmRequest
from machd.dialects.anthropic.request import MessagesRequest
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.completions.request import CompletionRequest
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError

_TURNS = [{"role": "user", "content": "hi"}]
_BODIES: dict[
    type[ChatCompletionRequest | CompletionRequest | ResponsesRequest | MessagesRequest],
    dict[str, object],
] = {
    ChatCompletionRequest: {"messages": _TURNS},
    CompletionRequest: {"prompt": "hi"},
    ResponsesRequest: {"input": "hi"},
    MessagesRequest: {"messages": _TURNS, "max_tokens": 2},
}
_MARK = {"type": "ephemeral", "ttl": "1h"}

each_dialect = pytest.mark.parametrize("type_", _BODIES)


def _body(type_: type, **fields: object) -> bytes:
    return json.dumps({"model": "m", **_BODIES[type_], **fields}).encode()


@each_dialect
def test_a_salt_reaches_the_options(
    type_: type[ChatCompletionRequest | CompletionRequest | ResponsesRequest | MessagesRequest],
) -> None:
    """Of 1 to 256 characters; null and nothing are the same."""
    for salt in ("s", "x" * 256):
        assert decode_body(_body(type_, cache_salt=salt), type_).checked().options().cache_salt == (
            salt
        )
    for fields in ({}, {"cache_salt": None}):
        assert decode_body(_body(type_, **fields), type_).checked().options().cache_salt is None


@each_dialect
@pytest.mark.parametrize("salt", ["", "x" * 257, 1, ["s"]])
def test_what_is_no_salt_is_refused_by_name(
    type_: type[ChatCompletionRequest], salt: object
) -> None:
    """It is a secret, so that the refusal quotes nothing of it."""
    with pytest.raises(InvalidRequestError) as refusal:
        decode_body(_body(type_, cache_salt=salt), type_)
    assert refusal.value.param == "cache_salt"
    assert "xxx" not in refusal.value.message


@pytest.mark.parametrize("type_", [ChatCompletionRequest, ResponsesRequest])
def test_openai_s_hints_are_taken_and_are_no_salt(type_: type[ChatCompletionRequest]) -> None:
    """They are hints for the lookup, and do not separate namespaces."""
    hints = {
        "prompt_cache_key": "tenant",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "auto"},
    }
    assert decode_body(_body(type_, **hints), type_).checked().options().cache_salt is None


def test_anthropic_s_marks_are_taken_everywhere() -> None:
    """Of the request, of the system's and a turn's blocks and of tools; all is cached anyway."""
    body = {
        "model": "m",
        "max_tokens": 2,
        "cache_control": _MARK,
        "system": [{"type": "text", "text": "be kind", "cache_control": _MARK}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": _MARK}]},
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "t1",
                        "name": "f",
                        "input": {},
                        "cache_control": _MARK,
                    }
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "b", "cache_control": _MARK}],
                        "cache_control": _MARK,
                    }
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": _MARK}],
    }
    request = decode_body(json.dumps(body).encode(), MessagesRequest).checked()
    assert len(request.conversation().messages) == 4
    assert request.options().cache_salt is None


def _warm(prompt: object) -> WarmPrompt:
    body = json.dumps({"prompts": [prompt]}).encode()
    (read,) = decode_body(body, WarmRequest).prompts
    read.check("prompts[0]")
    return read


def test_a_conversation_to_warm_is_a_chat_completion_s() -> None:
    """Messages, tools and what else the template is told are read as a chat completion's are."""
    asked = {
        "messages": _TURNS,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "reasoning_effort": "high",
    }
    chat = decode_body(
        json.dumps({"model": "m", **asked}).encode(), ChatCompletionRequest
    ).checked()
    assert _warm(asked).conversation("m") == chat.conversation()
    assert _warm({"prompt": "hi"}).conversation("m") is None


@pytest.mark.parametrize(
    "prompt",
    [
        {},
        {"prompt": "a", "messages": _TURNS},
        {"prompt": ""},
        {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"prompt": "a", "reasoning_effort": "high"},
        {"prompt": ["a"]},
        {"messages": []},
        "a",
    ],
)
def test_what_is_no_prompt_is_refused_by_its_place(prompt: object) -> None:
    """One of text and messages, and nothing beside a text."""
    with pytest.raises(InvalidRequestError) as refusal:
        _warm(prompt)
    assert str(refusal.value.param).startswith("prompts[")


@pytest.mark.parametrize("count", [0, MAX_WARM_PROMPTS + 1])
def test_prompts_are_counted(count: int) -> None:
    """At least one, and no more than one request may keep busy with."""
    body = msgspec.json.encode({"prompts": [{"prompt": "a"}] * count})
    with pytest.raises(InvalidRequestError) as refusal:
        decode_body(body, WarmRequest)
    assert refusal.value.param == "prompts"
