"""Anthropic's own client: streams, structured output, tools, thoughts, counting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam
from pydantic import BaseModel
from support.clients.client_transcript import transcript
from support.clocks.polling import CEILING_S

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    """An answer that has few forms, so that a small model comes to its end."""

    country: Literal["France", "Italy"]
    is_european: bool


_WEATHER: ToolParam = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@contextmanager
def recorded(url: str, name: str, *, is_scripted: bool) -> Iterator[Anthropic]:
    """The client, which never tries again; what it sends and gets is compared at the end."""
    with (
        transcript(url, f"anthropic_{name}", is_scripted=is_scripted) as wire,
        Anthropic(base_url=wire.url, api_key="none", max_retries=0, timeout=CEILING_S) as client,
    ):
        yield client


def user(content: str) -> list[MessageParam]:
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


# --- the embedded model in a process of its own -----------------------------------------------


def test_a_streamed_message_and_its_count(served_url: str) -> None:
    """Text in pieces and a whole message at the end, whose input is what counting counts."""
    with recorded(served_url, "streamed_message", is_scripted=False) as client:
        counted = client.messages.count_tokens(model=MODEL, messages=user(QUESTION))
        with client.messages.stream(
            model=MODEL, messages=user(QUESTION), max_tokens=32, extra_body={"temperature": 0}
        ) as stream:
            pieces = list(stream.text_stream)
            message = stream.get_final_message()
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 1
    assert message.stop_reason == "end_turn"
    # Another test may have asked the same daemon before; what it computed once is counted apart.
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == counted.input_tokens


def test_an_answer_of_a_models_shape(served_url: str) -> None:
    """``parse`` gives an instance, and so does a stream."""
    question: Any = {"model": MODEL, "messages": user(QUESTION), "max_tokens": 64}
    question |= {"output_format": Capital, "extra_body": {"temperature": 0}}
    with recorded(served_url, "structured", is_scripted=False) as client:
        whole = client.messages.parse(**question)
        with client.messages.stream(**question) as stream:
            streamed = stream.get_final_message()
    assert isinstance(whole.parsed_output, Capital)
    assert streamed.parsed_output == whole.parsed_output


def test_a_call_that_must_be_made(served_url: str) -> None:
    """A tool that the request names is called with valid input."""
    with recorded(served_url, "forced_call", is_scripted=False) as client:
        message = client.messages.create(
            model=MODEL,
            messages=user("How is the weather in Paris?"),
            max_tokens=64,
            tools=[_WEATHER],
            tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            extra_body={"temperature": 0},
        )
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name == "weather"
    assert call.input in ({"city": "Paris"}, {"city": "Rome"})


# --- a model that follows a script ------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_round_of_tools(scripted_url: str, *, is_streamed: bool) -> None:
    """The model asks, the client's function answers, the model tells it."""
    messages = user("weather?")
    name = "tools_streamed" if is_streamed else "tools"
    with recorded(scripted_url, name, is_scripted=True) as client:

        def ask() -> Any:
            request: Any = {"model": "fake", "messages": messages, "max_tokens": 100}
            request["tools"] = [_WEATHER]
            if not is_streamed:
                return client.messages.create(**request)
            with client.messages.stream(**request) as stream:
                return stream.get_final_message()

        asked = ask()
        assert asked.stop_reason == "tool_use"
        (call,) = asked.content
        weather = {"Paris": "sunny", "Rome": "rainy"}[call.input["city"]]
        messages += [
            {"role": "assistant", "content": [call.to_dict()]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": weather}],
            },
        ]
        told = ask()
    assert [block.text for block in told.content] == ["It is sunny in Paris."]
    assert told.stop_reason == "end_turn"


def test_thoughts_before_the_answer(scripted_url: str) -> None:
    """Thoughts are a block, streamed and whole; sent back, they are taken."""
    question: Any = {"model": "fake", "messages": user("2 + 2?"), "max_tokens": 2000}
    question["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    with recorded(scripted_url, "thinking", is_scripted=True) as client:
        whole = client.messages.create(**question)
        with client.messages.stream(**question) as stream:
            thoughts = [event.thinking for event in stream if event.type == "thinking"]
            streamed = stream.get_final_message()
        question["messages"] += [
            {"role": "assistant", "content": [block.to_dict() for block in whole.content]},
            {"role": "user", "content": "And again?"},
        ]
        again = client.messages.create(**question)
    thought, answer = whole.content
    assert thought.type == "thinking"
    assert answer.type == "text"
    assert (thought.thinking, answer.text) == ("Two and two.", "Four.")
    assert "".join(thoughts) == thought.thinking
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert [block.type for block in again.content] == ["thinking", "text"]
