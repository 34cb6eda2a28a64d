"""The real process, the real model, the official client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.scraping import scrape
from support.daemon.serve_process import ServeProcess

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"


@pytest.fixture(name="server", scope="module")
def _server(embedded_model_path: Path) -> Iterator[ServeProcess]:
    """One daemon for the module."""
    assert embedded_model_path.is_file()
    with ServeProcess() as server:
        yield server


@pytest.fixture(name="client", scope="module")
def _client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    """The official client, without retries that would hide a failure."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, text: str, **options: Any) -> list[ChatCompletionChunk]:
    """A streamed chat, as its chunks."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        stream=True,
        **options,
    )
    return list(stream)


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    """The text of the first choice."""
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices
        if not choice.index
    )


def test_it_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    """Greedy, streamed and not, the answer names Paris; the second time its prompt is known."""
    whole = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32
    )
    chunks = ask(
        client, QUESTION, temperature=0, max_tokens=32, stream_options={"include_usage": True}
    )

    answer = whole.choices[0].message.content
    assert answer is not None
    assert "Paris" in answer
    assert text_of(chunks) == answer
    streamed = chunks[-1].usage
    assert whole.usage is not None
    assert streamed is not None
    assert streamed.total_tokens == whole.usage.total_tokens
    assert streamed.prompt_tokens_details is not None
    assert streamed.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert whole.choices[0].finish_reason == "stop"


def test_next_turn_begins_with_the_cached_answer(client: openai.OpenAI) -> None:
    """A conversation that goes on computes neither its prompt nor its answer again."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
    turn = client.chat.completions.create(messages=messages, stream=False, **options)
    messages += [
        {"role": "assistant", "content": turn.choices[0].message.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    following = client.chat.completions.create(messages=messages, stream=False, **options)

    assert turn.usage is not None
    assert following.usage is not None
    assert following.usage.prompt_tokens_details is not None
    cached_tokens = following.usage.prompt_tokens_details.cached_tokens
    assert cached_tokens is not None
    assert cached_tokens >= turn.usage.total_tokens - 1


def test_usage_counts_the_tokens_of_the_template_and_the_answer(
    server: ServeProcess, client: openai.OpenAI
) -> None:
    """``usage`` is what /tokenize counts: the rendered prompt, and the answer with its end."""
    messages = [{"role": "user", "content": QUESTION}]
    prompt = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()
    completion = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32
    )
    text = completion.choices[0].message.content
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()

    assert completion.usage is not None
    assert completion.usage.prompt_tokens == prompt["count"]
    assert completion.usage.completion_tokens == answer["count"] + 1


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    """The same seed gives the same text; n choices of one request differ from each other."""
    first = ask(client, "Tell me a story.", seed=5, max_tokens=12)
    again = ask(client, "Tell me a story.", seed=5, max_tokens=12)
    several = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me a story."}],
        seed=5,
        n=3,
        max_tokens=12,
    )

    texts = [choice.message.content for choice in several.choices]
    assert text_of(first) == text_of(again) == texts[0]
    assert len(set(texts)) > 1
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def test_completions_continue_a_text_with_logprobs(client: openai.OpenAI) -> None:
    """Legacy completions give text, logprobs in columns, and honour a stop string."""
    completion = client.completions.create(
        model=MODEL, prompt="1, 2, 3, 4, 5,", temperature=0, max_tokens=24, logprobs=2, stop=" 9"
    )

    choice = completion.choices[0]
    assert choice.text.startswith(" 6, 7, 8")
    assert " 9" not in choice.text
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs if value is not None)


def test_second_request_waits_for_the_first(server: ServeProcess, client: openai.OpenAI) -> None:
    """One generation at a time: the second one waits until the first one's client has left.

    Meanwhile the cache statistics say that they are stale.
    """

    def cache_status() -> object:
        return httpx.get(f"{server.url}/v1/cache/stats").json()["status"]

    question: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to a hundred."}],
    }
    with ThreadPoolExecutor(1) as pool:
        with client.chat.completions.create(
            **question, stream=True, max_tokens=4000, extra_body={"ignore_eos": True}
        ) as first:
            next(first)
            second = pool.submit(
                lambda: client.chat.completions.create(**question, stream=False, max_tokens=2)
            )
            wait_until(lambda: scrape(server.url, "machd_requests_waiting") == 1, "it waits")
            assert cache_status() == "stale_generation_in_flight"
            next(first)
            assert not second.done()
        assert second.result().choices[0].finish_reason == "length"
    wait_until(lambda: cache_status() == "ok", "nothing runs", seen=cache_status)


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    """Nothing is cut in silence: 400, the context's length and the request's."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[100] * 8192, max_tokens=1)

    assert caught.value.code == "context_length_exceeded"
    assert "8192" in caught.value.message
    assert "8193" in caught.value.message


def test_health_answers_while_a_long_prompt_is_tokenised(
    server: ServeProcess, client: openai.OpenAI
) -> None:
    """Health is answered over and over while a megabyte of prompt is tokenised."""
    prompt = "lorem ipsum dolor sit amet " * 40_000
    answered = 0
    with ThreadPoolExecutor(1) as pool, httpx.Client() as http:
        refused = pool.submit(
            lambda: client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        )
        while not refused.done():
            assert http.get(f"{server.url}/health").status_code == 200
            answered += 1
        with pytest.raises(openai.BadRequestError, match="context"):
            refused.result()
    # An event loop that tokenises answers what came before the prompt, and then all the rest at once.
    assert answered > 10


@pytest.mark.long  # test_service_stop.py lets streams finish in every run
def test_a_term_signal_lets_the_stream_finish(embedded_model_path: Path) -> None:
    """SIGTERM during a stream: the stream ends with [DONE], the process with exit code 0."""
    assert embedded_model_path.is_file()
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count to twenty."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 40,
        "ignore_eos": True,
    }
    refused = []
    with ServeProcess() as server:
        lines = []
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body, timeout=CEILING_S
        ) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 6:
                    server.terminate()
                    server.wait_for("daemon.draining")
                    refused.append(httpx.post(f"{server.url}/v1/chat/completions", json=body))
                    refused.append(httpx.get(f"{server.url}/health/ready"))
        exit_code = server.process.wait(CEILING_S)

    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert '"completion_tokens":40' in [line for line in lines if line][-2]
    assert [answer.status_code for answer in refused] == [503, 503]
    assert int(refused[0].headers["retry-after"]) >= 1
    assert exit_code == 0
    assert server.events[-1]["event"] == "daemon.stopped"
