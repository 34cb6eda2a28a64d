"""OpenAI's own client: chat, responses, structured output, calls, thoughts, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import Response
from pydantic import BaseModel
from support.clients.client_transcript import transcript
from support.clocks.polling import CEILING_S

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"


class Capital(BaseModel):
    """An answer that has few forms, so that a small model comes to its end."""

    country: Literal["France", "Italy"]
    is_european: bool


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


_WEATHER = pydantic_function_tool(Weather, name="weather")


@contextmanager
def recorded(url: str, name: str, *, is_scripted: bool) -> Iterator[OpenAI]:
    """The client, which never tries again; what it sends and gets is compared at the end."""
    with (
        transcript(url, f"openai_{name}", is_scripted=is_scripted) as wire,
        OpenAI(
            base_url=f"{wire.url}/v1", api_key="none", max_retries=0, timeout=CEILING_S
        ) as client,
    ):
        yield client


def user(content: str) -> list[ChatCompletionMessageParam]:
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


# --- the embedded model in a process of its own -----------------------------------------------


def test_a_streamed_chat(served_url: str) -> None:
    """Text in pieces, one end, and usage in the last chunk."""
    with recorded(served_url, "streamed_chat", is_scripted=False) as client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=user(QUESTION),
                temperature=0,
                max_completion_tokens=32,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "Paris" in "".join(texts)
    assert len([text for text in texts if text]) > 1
    assert chunks[-1].usage is not None


def test_an_answer_of_a_models_shape(served_url: str) -> None:
    """``parse`` gives an instance, from chat and from responses, streamed too."""
    with recorded(served_url, "structured", is_scripted=False) as client:
        whole = client.chat.completions.parse(
            model=MODEL, messages=user(QUESTION), temperature=0, response_format=Capital
        )
        with client.chat.completions.stream(
            model=MODEL, messages=user(QUESTION), temperature=0, response_format=Capital
        ) as stream:
            streamed = stream.get_final_completion()
        response = client.responses.parse(
            model=MODEL, input=QUESTION, temperature=0, text_format=Capital
        )
    parsed = whole.choices[0].message.parsed
    assert isinstance(parsed, Capital)
    assert streamed.choices[0].message.parsed == parsed
    assert isinstance(response.output_parsed, Capital)


def test_a_call_that_must_be_made(served_url: str) -> None:
    """``tool_choice: required`` makes even a tiny model's arguments valid."""
    with recorded(served_url, "forced_call", is_scripted=False) as client:
        completion = client.chat.completions.parse(
            model=MODEL,
            messages=user("How is the weather in Paris?"),
            temperature=0,
            tools=[_WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
        )
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "weather"
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_chain_of_responses(served_url: str) -> None:
    """A streamed response is continued by its id, and the model sees what was said."""
    with recorded(served_url, "responses_chain", is_scripted=False) as client:
        with client.responses.stream(
            model=MODEL, input=QUESTION, temperature=0, max_output_tokens=32
        ) as stream:
            types = {event.type for event in stream}
            first = stream.get_final_response()
        second = client.responses.create(
            model=MODEL,
            input="And of Italy?",
            previous_response_id=first.id,
            temperature=0,
            max_output_tokens=8,
        )
    assert "Paris" in first.output_text
    assert {"response.created", "response.output_text.delta", "response.completed"} <= types
    assert second.previous_response_id == first.id
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens


def test_log_probabilities_of_several_choices(served_url: str) -> None:
    """``n`` choices differ, and each token has its alternatives."""
    with recorded(served_url, "logprobs_and_choices", is_scripted=False) as client:
        completion = client.chat.completions.create(
            model=MODEL,
            messages=user("Tell me a story."),
            n=2,
            seed=5,
            max_tokens=8,
            logprobs=True,
            top_logprobs=2,
            extra_body={"ignore_eos": True},
        )
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert len({choice.message.content for choice in completion.choices}) == 2
    for choice in completion.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert len(tokens) == 8
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
        assert "".join(token.token for token in tokens) == choice.message.content


# --- a model that follows a script ------------------------------------------------------------


def test_a_round_of_tools(scripted_url: str) -> None:
    """The model asks, the client's function answers, the model tells it."""
    messages = user("weather?")
    with recorded(scripted_url, "tools", is_scripted=True) as client:
        asked = client.chat.completions.create(model="fake", messages=messages, tools=[_WEATHER])
        message = asked.choices[0].message
        assert asked.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls or []:
            assert call.type == "function"
            messages += [
                {"role": "assistant", "tool_calls": [plain(call)]},
                {"role": "tool", "tool_call_id": call.id, "content": weather(call)},
            ]
        told = client.chat.completions.create(model="fake", messages=messages, tools=[_WEATHER])
    assert told.choices[0].message.content == "It is sunny in Paris."
    assert told.choices[0].finish_reason == "stop"


def test_a_streamed_round_of_tools(scripted_url: str) -> None:
    """The same, of pieces that the client puts together."""
    messages = user("weather?")
    with recorded(scripted_url, "tools_streamed", is_scripted=True) as client:
        with client.chat.completions.stream(
            model="fake", messages=messages, tools=[_WEATHER]
        ) as stream:
            asked = stream.get_final_completion().choices[0]
        assert asked.finish_reason == "tool_calls"
        (call,) = asked.message.tool_calls or []
        assert call.function.parsed_arguments == Weather(city="Paris")
        messages += [
            {"role": "assistant", "tool_calls": [plain(call)]},
            {"role": "tool", "tool_call_id": call.id, "content": weather(call)},
        ]
        with client.chat.completions.stream(
            model="fake", messages=messages, tools=[_WEATHER]
        ) as stream:
            told = stream.get_final_completion().choices[0]
    assert told.message.content == "It is sunny in Paris."


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_round_of_tools_in_responses(scripted_url: str, *, is_streamed: bool) -> None:
    """A call is an item; its output goes to the next response of the chain."""
    name = "responses_tools_streamed" if is_streamed else "responses_tools"
    tool: Any = {**_WEATHER["function"], "type": "function"}
    with recorded(scripted_url, name, is_scripted=True) as client:

        def ask(given: Any, **fields: Any) -> Any:
            request = {"model": "fake", "input": given, "tools": [tool], **fields}
            if not is_streamed:
                return client.responses.create(**request)
            with client.responses.stream(**request) as stream:
                return stream.get_final_response()

        first = ask("weather?")
        (call,) = first.output
        assert (call.type, call.name, json.loads(call.arguments)) == (
            "function_call",
            "weather",
            {"city": "Paris"},
        )
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = ask([output], previous_response_id=first.id)
    assert second.output_text == "It is sunny in Paris."


def test_thoughts_beside_the_answer(scripted_url: str) -> None:
    """Text between the model's markers is ``reasoning_content``, streamed and whole."""
    question: Any = {"model": "fake", "messages": user("2 + 2?"), "reasoning_effort": "low"}
    with recorded(scripted_url, "reasoning", is_scripted=True) as client:
        message = client.chat.completions.create(**question).choices[0].message.model_dump()
        chunks = list(client.chat.completions.create(**question, stream=True))
    deltas = [choice.delta.model_dump() for chunk in chunks for choice in chunk.choices]
    assert (message["reasoning_content"], message["content"]) == ("Two and two.", "Four.")
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]


def test_thoughts_are_an_item_of_a_response(scripted_url: str) -> None:
    """The same in responses: an item of its own before the message, and events of its own."""
    question: Any = {"model": "fake", "input": "2 + 2?", "reasoning": {"effort": "low"}}
    with recorded(scripted_url, "responses_reasoning", is_scripted=True) as client:
        whole = client.responses.create(**question)
        with client.responses.stream(**question) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
    responses: list[Response] = [whole, streamed]
    for response in responses:
        thought, _message = response.output
        assert thought.type == "reasoning"
        assert [part.text for part in thought.content or []] == ["Two and two."]
        assert response.output_text == "Four."
    thoughts = [one.delta for one in events if one.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Two and two."
    assert [one.sequence_number for one in events] == list(range(len(events)))


def test_log_probabilities_do_not_depend_on_the_stream(scripted_url: str) -> None:
    """Streamed and whole, there is an entry for each token, and they are the same."""
    question: Any = {"model": "fake", "messages": user("say abcdef"), "max_tokens": 3}
    question |= {"logprobs": True, "top_logprobs": 1}
    with recorded(scripted_url, "logprobs", is_scripted=True) as client:
        (whole,) = client.chat.completions.create(**question).choices
        chunks = list(client.chat.completions.create(**question, stream=True))
    streamed = [choice.logprobs for chunk in chunks for choice in chunk.choices]
    assert whole.message.content == "abc"
    assert whole.logprobs is not None
    assert [token.token for token in whole.logprobs.content or []] == ["a", "b", "c"]
    assert [
        token for logprobs in streamed if logprobs is not None for token in logprobs.content or []
    ] == whole.logprobs.content


def weather(call: Any) -> str:
    """The client's function."""
    return {"Paris": "sunny", "Rome": "rainy"}[json.loads(call.function.arguments)["city"]]


def plain(call: Any) -> Any:
    """A parsed call as it is sent back."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}
