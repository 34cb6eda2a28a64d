"""Tokenising requests: one of two inputs, with the right default for special tokens."""

from __future__ import annotations

import json

import msgspec
import pytest

from machd.dialects.tokens.request import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from machd.dialects.wire.decoding import decode_body
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.conversation import FunctionTool

_MESSAGES = [{"role": "user", "content": "hi"}]


def _request(**fields: object) -> TokenizeRequest:
    return decode_body(json.dumps(fields).encode(), TokenizeRequest).checked()


def test_special_tokens_default_depends_on_the_input() -> None:
    """A text gets special tokens and a rendered conversation does not, unless asked otherwise."""
    assert _request(prompt="a").adds_special_tokens
    assert not _request(messages=_MESSAGES).adds_special_tokens
    assert not _request(prompt="a", add_special_tokens=False).adds_special_tokens
    assert _request(messages=_MESSAGES, add_special_tokens=True).adds_special_tokens


def test_messages_are_rendered_like_those_of_a_chat() -> None:
    """The template sees the same messages as in a chat completion."""
    assert _request(messages=_MESSAGES).conversation().messages == _MESSAGES
    assert _request(prompt="a").conversation().messages == []


def test_tools_and_template_variables_are_those_of_a_chat() -> None:
    """All that a chat completion's prompt may contain can be counted here."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    conversation = _request(
        messages=_MESSAGES, tools=[tool], chat_template_kwargs={"enable_thinking": False}
    ).conversation()
    assert conversation.tools == (FunctionTool("f", parameters={"type": "object"}),)
    assert conversation.thinks is False
    assert conversation.template_variables == {"enable_thinking": False}


def test_a_last_message_is_continued_or_answered() -> None:
    """Not both, and only where the last message is the assistant's."""
    answer = [*_MESSAGES, {"role": "assistant", "content": "so"}]
    request = _request(messages=answer, continue_final_message=True, add_generation_prompt=False)
    assert request.conversation().continues_final_message
    for fields in (
        {"messages": answer, "continue_final_message": True},
        {
            "messages": _MESSAGES,
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ):
        with pytest.raises(InvalidRequestError) as caught:
            _request(**fields)
        assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("fields", [{}, {"model": "m"}, {"prompt": "a", "messages": _MESSAGES}])
def test_one_input_is_required(fields: dict[str, object]) -> None:
    """Neither input, or both, is a 400."""
    with pytest.raises(InvalidRequestError):
        _request(**fields)


def test_messages_are_checked() -> None:
    """A part that no template is shown is refused here too."""
    with pytest.raises(UnsupportedParameterError):
        _request(messages=[{"role": "user", "content": [{"type": "input_audio"}]}])


def test_detokenized_ids_are_held_against_the_vocabulary() -> None:
    """An id outside the vocabulary is a 400 on ``tokens``."""
    request = decode_body(b'{"tokens": [1, 100]}', DetokenizeRequest)
    request.check_vocabulary(101)
    with pytest.raises(InvalidRequestError) as caught:
        request.check_vocabulary(100)
    assert caught.value.param == "tokens"


def test_responses_have_the_fields_of_the_wire() -> None:
    """The spelling is that of the servers which have these endpoints."""
    response = TokenizeResponse(count=1, max_model_len=9, tokens=[4])
    assert msgspec.to_builtins(response) == {
        "count": 1,
        "max_model_len": 9,
        "tokens": [4],
        "token_strs": None,
    }
    assert msgspec.to_builtins(DetokenizeResponse(prompt="a")) == {"prompt": "a"}
