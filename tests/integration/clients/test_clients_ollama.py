"""Ollama's own client: models, streams, structured output, tools, thoughts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
from ollama import Client, ResponseError
from pydantic import BaseModel
from support.clients.client_transcript import transcript
from support.clocks.polling import CEILING_S

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
GREEDY = {"temperature": 0, "num_predict": 64}


class Capital(BaseModel):
    """An answer that has few forms, so that a small model comes to its end."""

    country: Literal["France", "Italy"]
    is_european: bool


def weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: Its name.
    """
    return {"Paris": "sunny", "Rome": "rainy"}[city]


@contextmanager
def recorded(url: str, name: str, *, is_scripted: bool) -> Iterator[Client]:
    """The client; what it sends and gets is compared at the end."""
    with (
        transcript(url, f"ollama_{name}", is_scripted=is_scripted) as wire,
        Client(host=wire.url, timeout=CEILING_S) as client,
    ):
        yield client


def user(content: str) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


# --- the embedded model in a process of its own -----------------------------------------------


def test_the_model_is_listed_and_shown(served_url: str) -> None:
    """``list``, ``ps`` and ``show`` tell of the one model, whose name ``chat`` takes."""
    with Client(host=served_url, timeout=CEILING_S) as client:
        (listed,) = client.list().models
        (running,) = client.ps().models
        shown = client.show(str(listed.model))
    assert listed.model == running.model == MODEL
    assert listed.size == running.size
    assert listed.digest == running.digest
    assert running.context_length == 8192
    assert listed.details is not None
    assert (listed.details.family, listed.details.parameter_size) == ("llama", "134.52M")
    assert shown.details == listed.details
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 8192


def test_a_streamed_chat(served_url: str) -> None:
    """Text in pieces, and what it took with the last; whole, it is the same."""
    with recorded(served_url, "streamed_chat", is_scripted=False) as client:
        parts = list(client.chat(MODEL, user(QUESTION), stream=True, options=GREEDY))
        whole = client.chat(MODEL, user(QUESTION), options=GREEDY)
    text = "".join(part.message.content or "" for part in parts)
    assert "Paris" in text
    assert text == whole.message.content
    assert len(parts) > 2
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == whole.done_reason == "stop"
    assert parts[-1].eval_count == whole.eval_count
    assert (whole.total_duration or 0) > (whole.eval_duration or 0) > 0


def test_a_streamed_generation(served_url: str) -> None:
    """A prompt is answered in pieces and whole; without one the model is said to be loaded."""
    with recorded(served_url, "streamed_generation", is_scripted=False) as client:
        parts = list(client.generate(MODEL, QUESTION, stream=True, options=GREEDY))
        whole = client.generate(MODEL, QUESTION, options=GREEDY, keep_alive="5m")
        loaded = client.generate(MODEL, "", keep_alive=-1)
    assert "".join(part.response or "" for part in parts) == whole.response
    assert "Paris" in whole.response
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")


def test_an_answer_of_a_models_shape(served_url: str) -> None:
    """``format`` takes a model's schema, and its answer is an instance, streamed and whole."""
    schema = Capital.model_json_schema()
    with recorded(served_url, "structured", is_scripted=False) as client:
        whole = client.chat(MODEL, user(QUESTION), format=schema, options=GREEDY)
        parts = client.chat(MODEL, user(QUESTION), format=schema, options=GREEDY, stream=True)
        streamed = "".join(part.message.content or "" for part in parts)
    assert Capital.model_validate_json(whole.message.content or "").country in ("France", "Italy")
    assert streamed == whole.message.content


# --- a model that follows a script ------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_round_of_tools(scripted_url: str, *, is_streamed: bool) -> None:
    """The model asks, the client's function answers, the model tells it."""
    messages: list[Any] = user("weather?")
    name = "tools_streamed" if is_streamed else "tools"
    with recorded(scripted_url, name, is_scripted=True) as client:

        def ask() -> Any:
            if not is_streamed:
                return client.chat("fake", messages, tools=[weather]).message
            parts = list(client.chat("fake", messages, tools=[weather], stream=True))
            calling = [part.message for part in parts if part.message.tool_calls]
            return calling[0] if calling else parts

        asked = ask()
        (call,) = asked.tool_calls
        assert call.function.name == "weather"
        answer = weather(**call.function.arguments)
        messages += [asked, {"role": "tool", "tool_name": "weather", "content": answer}]
        told = ask()
    parts = [part.message for part in told] if is_streamed else [told]
    assert "".join(part.content for part in parts) == "It is sunny in Paris."


def test_thoughts_before_the_answer(scripted_url: str) -> None:
    """Thoughts stand apart, streamed and whole; sent back, they are taken."""
    with recorded(scripted_url, "thinking", is_scripted=True) as client:
        whole = client.chat("fake", user("2 + 2?"), think=True).message
        parts = [
            part.message for part in client.chat("fake", user("2 + 2?"), think="low", stream=True)
        ]
        again = client.chat("fake", [*user("2 + 2?"), whole, *user("And again?")], think=True)
    assert (whole.thinking, whole.content) == ("Two and two.", "Four.")
    assert "".join(part.thinking or "" for part in parts) == whole.thinking
    assert "".join(part.content or "" for part in parts) == whole.content
    assert again.message.thinking == whole.thinking


_REFUSED: dict[str, tuple[int, Callable[[Client], object]]] = {
    "pull": (404, lambda client: client.pull("fake")),
    "streamed pull": (404, lambda client: list(client.pull("fake", stream=True))),
    "push": (404, lambda client: client.push("fake")),
    "create": (404, lambda client: client.create("other", from_="fake")),
    "copy": (404, lambda client: client.copy("fake", "other")),
    "embed": (400, lambda client: client.embed("fake", "hi")),
    "embeddings": (400, lambda client: client.embeddings("fake", "hi")),
    "context": (400, lambda client: client.generate("fake", "hi", context=[1])),
    "mirostat": (400, lambda client: client.generate("fake", "hi", options={"mirostat": 2})),
    "streamed suffix": (400, lambda client: list(client.generate("fake", "a", "b", stream=True))),
    "an image": (400, lambda client: client.generate("fake", "hi", images=["AAAA"])),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_is_refused_is_an_error_of_the_clients_own(scripted_url: str, name: str) -> None:
    """The client raises its error with our message; no answer is one that it cannot read."""
    status, ask = _REFUSED[name]
    with Client(host=scripted_url, timeout=CEILING_S) as client:
        with pytest.raises(ResponseError) as refused:
            ask(client)
        assert client.chat("fake", user("say ok")).message.content == "ok"
    assert refused.value.status_code == status
    assert not refused.value.error.startswith("{")
    assert len(refused.value.error) > 20


def test_a_model_cannot_be_deleted(scripted_url: str) -> None:
    """``delete`` raises the client's error, and the model is still listed."""
    with Client(host=scripted_url, timeout=CEILING_S) as client:
        with pytest.raises(ResponseError, match="the one model that it was started with"):
            client.delete("fake")
        assert [model.model for model in client.list().models] == ["fake"]
