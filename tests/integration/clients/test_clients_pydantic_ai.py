"""Agents of Pydantic AI: streams, typed output, tools that the agent runs itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelResponse, ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from support.clients.client_transcript import transcript
from support.clocks.polling import CEILING_S

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
_GREEDY = ModelSettings(temperature=0, max_tokens=64, parallel_tool_calls=False)


class Capital(BaseModel):
    """An answer that has few forms, so that a small model comes to its end."""

    country: Literal["France", "Italy"]
    is_european: bool


@asynccontextmanager
async def recorded(url: str, name: str, *, is_scripted: bool) -> AsyncIterator[OpenAIProvider]:
    """The library's way to the daemon; what it sends and gets is compared at the end."""
    with transcript(url, f"pydantic_ai_{name}", is_scripted=is_scripted) as wire:
        async with httpx.AsyncClient(timeout=CEILING_S) as http:
            yield OpenAIProvider(base_url=f"{wire.url}/v1", api_key="none", http_client=http)


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return {"Paris": "sunny", "Rome": "rainy"}[city]


# --- the embedded model in a process of its own -----------------------------------------------


async def test_a_streamed_chat(served_url: str) -> None:
    """Text in pieces, and usage at the end."""
    async with recorded(served_url, "streamed_chat", is_scripted=False) as provider:
        agent = Agent(OpenAIChatModel(MODEL, provider=provider), model_settings=_GREEDY)
        async with agent.run_stream(QUESTION) as run:
            pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
            usage = run.usage
    assert "Paris" in "".join(pieces)
    assert len(pieces) > 1
    assert usage.input_tokens > 0
    assert usage.output_tokens > 0


@pytest.mark.parametrize(
    ("way", "name"),
    [(ToolOutput, "structured_by_tool"), (NativeOutput, "structured_by_schema")],
)
async def test_an_output_of_a_models_shape(served_url: str, way: Any, name: str) -> None:
    """An agent's output is an instance, by a call that must be made and by a schema."""
    async with recorded(served_url, name, is_scripted=False) as provider:
        model = OpenAIChatModel(MODEL, provider=provider)
        agent = Agent(model, output_type=way(Capital), retries=0, model_settings=_GREEDY)
        result = await agent.run(QUESTION)
    assert isinstance(result.output, Capital)


# --- a model that follows a script ------------------------------------------------------------


async def test_a_round_of_tools(scripted_url: str) -> None:
    """The agent runs the function that the model asks for, and the model tells its result."""
    async with recorded(scripted_url, "tools", is_scripted=True) as provider:
        agent = Agent(OpenAIChatModel("fake", provider=provider), tools=[weather])
        result = await agent.run("weather?")
    assert result.output == "It is sunny in Paris."


async def test_a_streamed_round_of_tools(scripted_url: str) -> None:
    """The same, streamed."""
    async with recorded(scripted_url, "tools_streamed", is_scripted=True) as provider:
        agent = Agent(OpenAIChatModel("fake", provider=provider), tools=[weather])
        async with agent.run_stream("weather?") as run:
            output = await run.get_output()
    assert output == "It is sunny in Paris."


async def test_a_round_of_tools_in_responses(scripted_url: str) -> None:
    """The same agent over the other API."""
    async with recorded(scripted_url, "responses_tools", is_scripted=True) as provider:
        agent = Agent(OpenAIResponsesModel("fake", provider=provider), tools=[weather])
        result = await agent.run("weather?")
    assert result.output == "It is sunny in Paris."


async def test_thoughts_are_parts(scripted_url: str) -> None:
    """The agent sees what the model thought."""
    async with recorded(scripted_url, "reasoning", is_scripted=True) as provider:
        agent = Agent(OpenAIChatModel("fake", provider=provider))
        settings = ModelSettings(extra_body={"reasoning_effort": "low"})
        result = await agent.run("2 + 2?", model_settings=settings)
    (response,) = (one for one in result.new_messages() if isinstance(one, ModelResponse))
    thoughts = [part.content for part in response.parts if isinstance(part, ThinkingPart)]
    assert result.output == "Four."
    assert thoughts == ["Two and two."]
