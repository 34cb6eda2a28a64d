"""Official clients that stream from a model that has to be loaded first: they get the answer, or the error."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import ollama
import openai
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S
from support.daemon.several_models import several_models

_LOAD_S = 0.5
_CLIENTS = ("chat", "completions", "responses", "anthropic", "ollama")
_FAILURE = "could not be loaded"


@pytest.fixture(name="url", scope="module")
def _url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon with a model for each client, and one that cannot be loaded."""
    models = {"quick": "size=1"}
    for one in _CLIENTS:
        models[one] = f"size=1&load_s={_LOAD_S}"
        models[f"broken-{one}"] = f"size=1&load_s={_LOAD_S}&fails=1"
    folder = tmp_path_factory.mktemp("models")
    flags = {"streaming.keepalive_s": 0.1}
    with capture_logs(), several_models(folder, models, flags=flags) as daemon:
        yield daemon.url


@pytest.fixture(name="openai_client")
def _openai_client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=CEILING_S
    ) as client:
        yield client


def test_openai_chat(openai_client: openai.OpenAI) -> None:
    """The comments are skipped; an error is raised as one of the API."""

    def said(model: str) -> str:
        chunks = openai_client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "say hello"}], stream=True
        )
        return "".join(one.choices[0].delta.content or "" for one in chunks)

    assert said("chat") == "hello"
    with pytest.raises(openai.APIError, match=_FAILURE):
        said("broken-chat")


def test_openai_completions(openai_client: openai.OpenAI) -> None:
    """As chat."""

    def said(model: str) -> str:
        chunks = openai_client.completions.create(model=model, prompt="say hello", stream=True)
        return "".join(one.choices[0].text for one in chunks)

    assert said("completions") == "hello"
    with pytest.raises(openai.APIError, match=_FAILURE):
        said("broken-completions")


def test_openai_responses(openai_client: openai.OpenAI) -> None:
    """A response that fails has begun before, without which the client's own reader gives up."""
    with openai_client.responses.stream(model="responses", input="say hello") as stream:
        assert stream.get_final_response().output_text == "hello"
    with openai_client.responses.stream(model="broken-responses", input="say hello") as stream:
        *_, last = list(stream)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert _FAILURE in last.response.error.message


def test_anthropic(url: str) -> None:
    """Pings are skipped before the message as well as in it."""
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=CEILING_S
    ) as client:

        def said(model: str) -> str:
            with client.messages.stream(
                model=model, max_tokens=50, messages=[{"role": "user", "content": "say hello"}]
            ) as stream:
                return stream.get_final_text()

        assert said("anthropic") == "hello"
        with pytest.raises(anthropic.APIStatusError, match=_FAILURE):
            said("broken-anthropic")


def test_ollama(url: str) -> None:
    """Lines without text before the first one change nothing."""
    with ollama.Client(host=url, timeout=CEILING_S) as client:

        def said(model: str) -> str:
            lines = client.chat(
                model=model, messages=[{"role": "user", "content": "say hello"}], stream=True
            )
            return "".join(one.message.content or "" for one in lines)

        assert said("ollama") == "hello"
        with pytest.raises(ollama.ResponseError, match=_FAILURE):
            said("broken-ollama")
