"""LiteLLM, which speaks for many other programs: streams, structured output, tools, thoughts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from support.clients.client_transcript import transcript

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
pytestmark = [
    pytest.mark.long,  # its import takes ten seconds
    # pydantic's word on a type of LiteLLM's own, once, where that is used first
    pytest.mark.filterwarnings(
        "ignore:Item 'summary' on TypedDict class 'ChatCompletionReasoningItem':UserWarning"
    ),
]


class Capital(BaseModel):
    """An answer that has few forms, so that a small model comes to its end."""

    country: Literal["France", "Italy"]
    is_european: bool


_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library, which would fetch its table of costs where it is imported.

    It makes the thread's event loop where there is none, and leaves it open.
    """
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    with closing(asyncio.new_event_loop()) as event_loop:
        asyncio.set_event_loop(event_loop)
        import litellm  # noqa: PLC0415 - takes seconds, and reads its environment

        litellm.telemetry = False
        litellm.suppress_debug_info = True
        yield litellm
        asyncio.set_event_loop(None)


def asked(url: str, **fields: Any) -> dict[str, Any]:
    """Arguments of ``litellm.completion``."""
    return {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60, **fields}


def user(content: str) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


# --- the embedded model in a process of its own -----------------------------------------------


def test_a_streamed_chat(served_url: str, litellm: Any) -> None:
    """Text in pieces that the library puts together again."""
    messages = user(QUESTION)
    with transcript(served_url, "litellm_streamed_chat", is_scripted=False) as wire:
        chunks = list(
            litellm.completion(
                **asked(wire.url, model=f"openai/{MODEL}", messages=messages),
                temperature=0,
                max_tokens=32,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 1


def test_an_answer_of_a_models_shape(served_url: str, litellm: Any) -> None:
    """A class as the response format comes back as an instance's JSON."""
    with transcript(served_url, "litellm_structured", is_scripted=False) as wire:
        answer = litellm.completion(
            **asked(wire.url, model=f"openai/{MODEL}", messages=user(QUESTION)),
            temperature=0,
            max_tokens=64,
            response_format=Capital,
        )
    capital = Capital.model_validate_json(answer.choices[0].message.content)
    assert capital.country in ("France", "Italy")


# --- a model that follows a script ------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_a_round_of_tools(
    scripted_url: str, litellm: Any, provider: str, *, is_streamed: bool
) -> None:
    """The model asks, the caller's function answers, the model tells it, over both APIs."""
    messages = user("weather?")
    name = f"litellm_{provider}_tools{'_streamed' if is_streamed else ''}"
    with transcript(scripted_url, name, is_scripted=True) as wire:

        def ask() -> Any:
            request = asked(wire.url, model=f"{provider}/fake", messages=messages, tools=[_WEATHER])
            if provider == "anthropic":
                request |= {"api_base": wire.url, "max_tokens": 100}
            answer = litellm.completion(**request, stream=is_streamed)
            if is_streamed:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            return answer.choices[0]

        choice = ask()
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        messages += [
            choice.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        choice = ask()
    assert choice.message.content == "It is sunny in Paris."
    assert choice.finish_reason == "stop"


def test_thoughts_beside_the_answer(scripted_url: str, litellm: Any) -> None:
    """``reasoning_content`` comes through, streamed and whole."""
    with transcript(scripted_url, "litellm_reasoning", is_scripted=True) as wire:
        request = asked(wire.url, model="openai/fake", messages=user("2 + 2?"))
        request["extra_body"] = {"reasoning_effort": "low"}
        whole = litellm.completion(**request).choices[0].message
        chunks = list(litellm.completion(**request, stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0].message
    for message in (whole, streamed):
        assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")
