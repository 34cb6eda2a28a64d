"""machd's answers have the shape that the official ``openai`` client expects."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion as OpenAICompletion
from openai.types import Model as OpenAIModel
from openai.types.chat import ChatCompletion as OpenAIChatCompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk

from machd.dialects.chat.answer import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatResponseMessage,
)
from machd.dialects.completions.answer import Completion, CompletionChoice
from machd.dialects.logprobs import (
    LOGPROB_FLOOR,
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionChoiceLogprobs,
    wire_logprob,
)
from machd.dialects.models import Model, ModelList
from machd.dialects.usage import Usage
from machd.dialects.wire.errors import error_body
from machd.errors import InvalidRequestError, ModelNotServedError, QueueFullError
from machd.generations.generation import GenerationUsage

_USAGE = Usage.of(GenerationUsage(prompt_tokens=5, cached_tokens=4, completion_tokens=2))
_CHAT_LOGPROBS = ChatLogprobs(
    content=[
        ChatTokenLogprob(
            token="hi",
            logprob=-0.5,
            bytes=[104, 105],
            top_logprobs=[ChatTopLogprob(token="hi", logprob=-0.5, bytes=[104, 105])],
        )
    ]
)


def _wire(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


def _chunk(choice: ChatChunkChoice) -> ChatCompletionChunk:
    return ChatCompletionChunk(id="c", created=1, model="m", choices=[choice])


def test_chat_completion_is_openai_s() -> None:
    """A whole answer validates strictly, and no field gets lost on the way."""
    wire = _wire(
        ChatCompletion(
            id="chatcmpl-1",
            created=1,
            model="m",
            system_fingerprint="fp",
            choices=[
                ChatChoice(
                    index=0,
                    message=ChatResponseMessage(content="hi"),
                    logprobs=_CHAT_LOGPROBS,
                    finish_reason="stop",
                )
            ],
            usage=_USAGE,
        )
    )
    seen = OpenAIChatCompletion.model_validate(wire, strict=True)
    assert seen.choices[0].message.content == "hi"
    assert seen.choices[0].logprobs is not None
    assert seen.usage is not None
    assert seen.usage.total_tokens == 7
    assert seen.usage.prompt_tokens_details is not None
    assert seen.usage.prompt_tokens_details.cached_tokens == 4
    assert seen.model_extra == {}


def test_first_chunk_is_byte_for_byte_openai_s() -> None:
    """The role comes first, with an empty content, and no usage unless asked for."""
    chunk = _chunk(ChatChunkChoice(index=0, delta=ChatDelta(role="assistant", content="")))
    assert msgspec.json.encode(chunk) == (
        b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
        b'"system_fingerprint":null,"choices":[{"index":0,"delta":{"role":"assistant",'
        b'"content":""},"logprobs":null,"finish_reason":null}]}'
    )


@pytest.mark.parametrize(
    ("choice", "delta"),
    [
        (ChatChunkChoice(index=0, delta=ChatDelta(content="hi")), {"content": "hi"}),
        (ChatChunkChoice(index=0, delta=ChatDelta(), finish_reason="length"), {}),
        (
            ChatChunkChoice(index=1, delta=ChatDelta(content=""), logprobs=_CHAT_LOGPROBS),
            {"content": ""},
        ),
    ],
)
def test_later_chunks_are_openai_s(choice: ChatChunkChoice, delta: dict[str, str]) -> None:
    """A delta holds what is new and nothing else, and the chunk validates strictly."""
    wire = _wire(_chunk(choice))
    assert wire["choices"][0]["delta"] == delta
    assert OpenAIChunk.model_validate(wire, strict=True).model_extra == {}


@pytest.mark.parametrize(
    ("chunk", "usage"),
    [
        (ChatCompletionChunk(id="c", created=1, model="m", choices=[], usage=None), None),
        (
            ChatCompletionChunk(id="c", created=1, model="m", choices=[], usage=_USAGE),
            _wire(_USAGE),
        ),
        (Completion(id="c", created=1, model="m", choices=[], usage=None), None),
    ],
)
def test_usage_is_null_until_the_last_chunk(chunk: object, usage: object) -> None:
    """With ``include_usage`` every chunk has the key."""
    assert _wire(chunk)["usage"] == usage


def test_completion_is_openai_s() -> None:
    """A legacy completion with log-probabilities validates strictly."""
    wire = _wire(
        Completion(
            id="cmpl-1",
            created=1,
            model="m",
            choices=[
                CompletionChoice(
                    index=0,
                    text="hi",
                    finish_reason="length",
                    logprobs=CompletionChoiceLogprobs(
                        tokens=["hi"],
                        token_logprobs=[-0.5],
                        top_logprobs=[{"hi": -0.5, "ho": -1.5}],
                        text_offset=[0],
                    ),
                )
            ],
            usage=_USAGE,
        )
    )
    seen = OpenAICompletion.model_validate(wire, strict=True)
    assert seen.choices[0].logprobs is not None
    assert seen.choices[0].logprobs.text_offset == [0]
    assert seen.model_extra == {}


def test_models_are_openai_s() -> None:
    """The list and its rows are what the client pages through."""
    wire = _wire(ModelList(data=[Model(id="m", created=1, max_model_len=8192)]))
    assert wire["object"] == "list"
    assert OpenAIModel.model_validate(wire["data"][0], strict=True).owned_by == "machd"


@pytest.mark.parametrize(
    ("error", "wire"),
    [
        (
            InvalidRequestError("n: too large", param="n"),
            {
                "message": "n: too large",
                "type": "invalid_request_error",
                "param": "n",
                "code": "invalid_request",
            },
        ),
        (
            ModelNotServedError("no such model", param="model"),
            {
                "message": "no such model",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            },
        ),
        (
            QueueFullError("full"),
            {"message": "full", "type": "rate_limit_error", "param": None, "code": "queue_full"},
        ),
    ],
)
def test_errors_have_the_four_fields(error: InvalidRequestError, wire: dict[str, object]) -> None:
    """Every operating error has OpenAI's envelope, with nulls written out."""
    assert _wire(error_body(error)) == {"error": wire}


@given(logprob=st.floats())
def test_wire_logprob_is_a_json_number(logprob: float) -> None:
    """Minus infinity, NaN and all below the floor become the floor; the rest is untouched."""
    if math.isnan(logprob) or logprob <= LOGPROB_FLOOR:
        assert wire_logprob(logprob) == LOGPROB_FLOOR
    else:
        assert wire_logprob(logprob) == logprob


@given(text=st.text(), prompt=st.integers(0, 10**6), completion=st.integers(0, 10**6))
def test_answers_read_back_as_they_were(text: str, prompt: int, completion: int) -> None:
    """Encoding and decoding an answer changes nothing, whatever the text."""
    answer = ChatCompletion(
        id="c",
        created=1,
        model="m",
        choices=[
            ChatChoice(index=0, message=ChatResponseMessage(content=text), finish_reason="stop")
        ],
        usage=Usage.of(
            GenerationUsage(prompt_tokens=prompt, cached_tokens=0, completion_tokens=completion)
        ),
    )
    assert msgspec.json.decode(msgspec.json.encode(answer), type=ChatCompletion) == answer
    assert answer.usage.total_tokens == prompt + completion
