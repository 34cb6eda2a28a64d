"""Calls and thoughts in chat completions, through OpenAI's own client, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletion
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat, sse_data, told
from support.engines.fake_engine import FakeEngine, spelled

_ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
_NOW = {"type": "function", "function": {"name": "now"}}
_ADDED = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
_TWICE = f'{_ADDED}<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>'


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for the module; its model says what it is told."""
    with RunningDaemon(lambda: FakeEngine(told), {"limits.max_tokens_default": 200}) as running:
        yield running


@pytest.fixture(scope="module")
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    """A client of that daemon."""
    with httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client:
        yield client


@pytest.fixture(scope="module")
def client(daemon: RunningDaemon) -> Iterator[OpenAI]:
    """OpenAI's client, which never tries again."""
    with OpenAI(
        base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=CEILING_S
    ) as opened:
        yield opened


def _ask(http: httpx.Client, content: str, **fields: object) -> Any:
    answer = http.post("/v1/chat/completions", json=chat(content, **fields))
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate(answer.json(), strict=True)
    return answer.json()["choices"][0]


def _stream(http: httpx.Client, content: str, **fields: object) -> Any:
    """A choice as OpenAI's own accumulator puts it together, in the shape of a whole one."""
    answer = http.post("/v1/chat/completions", json=chat(content, stream=True, **fields))
    chunks = [one for event in sse_data(answer.content) for one in event["choices"]]
    assert all(chunk["delta"] for chunk in chunks[:-1])
    message: dict[Any, Any] = {}
    for chunk in chunks:
        message = accumulate_delta(message, chunk["delta"])
    for call in message.get("tool_calls", []):
        del call["index"]
    return {"message": message, "finish_reason": chunks[-1]["finish_reason"]}


def _calls(choice: Any) -> list[tuple[str, object]]:
    calls = choice["message"].get("tool_calls", [])
    assert all(one["type"] == "function" and one["id"].startswith("call_") for one in calls)
    assert len({one["id"] for one in calls}) == len(calls)
    return [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in calls]


@pytest.mark.parametrize("ask", [_ask, _stream])
@pytest.mark.parametrize(
    ("said", "content", "calls"),
    [
        (_ADDED, "", [("add", {"a": 1, "b": 2})]),
        (f"Let me see. {_ADDED}", "Let me see.", [("add", {"a": 1, "b": 2})]),
        (_TWICE, "", [("add", {"a": 1, "b": 2}), ("now", {})]),
    ],
)
def test_calls_are_told_from_text(
    http: httpx.Client, ask: Any, said: str, content: str, calls: list[object]
) -> None:
    """Names and arguments come out parsed, ids are there and the finish reason says so."""
    choice = ask(http, f"say {said}", tools=[_ADD, _NOW])
    assert _calls(choice) == calls
    assert (choice["message"]["content"] or "").strip() == content
    assert choice["finish_reason"] == "tool_calls"


def test_content_is_null_beside_calls_alone(http: httpx.Client) -> None:
    """A whole answer that says nothing has no empty text."""
    assert _ask(http, f"say {_ADDED}", tools=[_ADD])["message"]["content"] is None


@pytest.mark.parametrize("ask", [_ask, _stream])
def test_without_tools_nothing_is_a_call(http: httpx.Client, ask: Any) -> None:
    """Markers are text where no tool was offered, or calls were ruled out."""
    for fields in ({}, {"tools": [_ADD], "tool_choice": "none"}):
        choice = ask(http, f"say {_ADDED}", **fields)
        assert choice["message"]["content"] == _ADDED
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("ask", [_ask, _stream])
def test_one_call_is_all_where_parallel_calls_are_off(http: httpx.Client, ask: Any) -> None:
    """The answer ends with its first call."""
    choice = ask(http, f"say {_TWICE}", tools=[_ADD, _NOW], parallel_tool_calls=False)
    assert _calls(choice) == [("add", {"a": 1, "b": 2})]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("ask", [_ask, _stream])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"add", "now"}),
        ({"type": "function", "function": {"name": "add"}}, {"add"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "now"}}],
                },
            },
            {"now"},
        ),
    ],
)
def test_a_call_that_is_asked_for_is_made(
    http: httpx.Client, ask: Any, choice: object, names: set[str]
) -> None:
    """A model that would rather talk is held to calling, and to the schema of the arguments."""
    answer = ask(
        http,
        "say no",
        tools=[_ADD, _NOW],
        tool_choice=choice,
        parallel_tool_calls=False,
        reasoning_effort="none",
    )
    ((name, arguments),) = _calls(answer)
    assert name in names
    assert isinstance(arguments, dict)
    if name == "add":
        assert arguments.keys() == {"a", "b"}
    assert not answer["message"]["content"]


def test_the_client_streams_calls(client: OpenAI) -> None:
    """OpenAI's own stream helper puts the calls together and parses their arguments."""
    with client.chat.completions.stream(
        model="fake",
        messages=[{"role": "user", "content": f"say {_ADDED}"}],
        tools=[_ADD],  # type: ignore[list-item]
    ) as stream:
        answer = stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.name == "add"
    assert call.function.parsed_arguments == {"a": 1, "b": 2}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_results_of_calls_reach_the_template(http: httpx.Client) -> None:
    """A conversation with a call and its result goes on."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    body = {
        "model": "fake",
        "messages": [
            {"role": "user", "content": "sum"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "say 3"},
        ],
        "tools": [_ADD],
    }
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "3"
    counted = {**body, "model": "fake", "add_generation_prompt": True}
    tokens = http.post("/tokenize", json=counted).json()
    assert tokens["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("ask", [_ask, _stream])
def test_thoughts_are_told_from_the_answer(ask: Any) -> None:
    """Both names hold the thoughts, and the content has none of them."""
    with (
        RunningDaemon(lambda: FakeEngine(spelled("<think>hm, well</think>so"))) as thinker,
        httpx.Client(base_url=thinker.url, timeout=CEILING_S) as http,
    ):
        message = ask(http, "hi")["message"]
    assert message["reasoning_content"] == message["reasoning"] == "hm, well"
    assert message["content"] == "so"


def _thought_and_answer(path: str, answer: dict[str, Any]) -> tuple[str, str]:
    if path == "/v1/messages":
        thought, text = answer["content"]
        return thought["thinking"], text["text"]
    if path == "/api/chat":
        return answer["message"]["thinking"], answer["message"]["content"]
    message = answer["choices"][0]["message"]
    return message["reasoning_content"], message["content"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 40},
        ),
        ("/v1/messages", {"model": "fake", "max_tokens": 40}),
        ("/api/chat", {"stream": False, "options": {"num_predict": 40}}),
    ],
)
def test_rest_of_a_thought_that_the_client_began_is_a_thought(
    path: str, fields: dict[str, object]
) -> None:
    """A final message that stops inside of a thought goes on as thought, then as the answer."""
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nLet me"},
    ]
    with (
        RunningDaemon(lambda: FakeEngine(spelled(" see</think>so"))) as thinker,
        httpx.Client(base_url=thinker.url, timeout=CEILING_S) as http,
    ):
        answer = http.post(path, json={"messages": turns, **fields})
    assert answer.status_code == 200, answer.text
    assert _thought_and_answer(path, answer.json()) == (" see", "so")


def test_effort_and_continuation_change_the_prompt(http: httpx.Client) -> None:
    """A model that is to think has its thoughts opened, and a continued message stays open."""

    def prompt_tokens(**fields: object) -> int:
        answer = http.post("/v1/chat/completions", json=chat("hi", max_tokens=1, **fields))
        return int(answer.json()["usage"]["prompt_tokens"])

    plain = prompt_tokens()
    assert prompt_tokens(chat_template_kwargs={"enable_thinking": True}) > plain
    assert prompt_tokens(reasoning_effort="low") > plain
    body = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert prompt_tokens(**body) == len("user: a\nassistant: so")
    assert http.post("/tokenize", json=body).json()["count"] == len("user: a\nassistant: so")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_cover_calls_and_thoughts(http: httpx.Client, stream: bool) -> None:  # noqa: FBT001
    """One entry a token, even of those that show nowhere in the message."""
    body = chat(f"say x{_ADDED}", tools=[_ADD], logprobs=True, stream=stream)
    answer = http.post("/v1/chat/completions", json=body)
    choices = (
        [one for event in sse_data(answer.content) for one in event["choices"]]
        if stream
        else answer.json()["choices"]
    )
    entries = [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]]
    assert "".join(entry["token"] for entry in entries) == f"x{_ADDED}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [_ADD, _ADD]}, "tools[1].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"functions": [{"name": "f"}], "tools": [_ADD]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"reasoning_effort": "immense"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    ],
)
def test_refusals_name_their_field(client: OpenAI, fields: dict[str, object], param: str) -> None:
    """OpenAI's client gets a 400 about the field."""
    with pytest.raises(BadRequestError) as caught:
        client.post("/chat/completions", body=chat("hi", **fields), cast_to=object)
    assert caught.value.param == param


def test_capabilities_say_what_requests_may_use(http: httpx.Client) -> None:
    """The daemon says that it has the features which this file's tests use."""
    features = http.get("/v1/capabilities").json()["features"]
    assert features == {
        "chat": True,
        "logprobs": True,
        "tools": True,
        "tool_format": "json_tools",
        "system_messages": "anywhere",
        "reasoning": True,
        "structured_output": True,
        "vision": False,
        "video": False,
        "embeddings": False,
        "scores": False,
        "classes": False,
    }


def test_a_service_tier_is_repeated(http: httpx.Client) -> None:
    """In every chunk and in the whole answer, if it was asked for."""
    for asked, used in (("auto", "default"), ("flex", "flex")):
        body = chat("say x", service_tier=asked)
        assert http.post("/v1/chat/completions", json=body).json()["service_tier"] == used
        stream = http.post("/v1/chat/completions", json={**body, "stream": True})
        assert {event["service_tier"] for event in sse_data(stream.content)} == {used}
    assert "service_tier" not in http.post("/v1/chat/completions", json=chat("say x")).json()


def test_fingerprints_are_stable(http: httpx.Client) -> None:
    """Every answer and chunk of one daemon says the same, whatever the endpoint."""
    seen = set()
    for path, body in (
        ("/v1/chat/completions", chat("say x")),
        ("/v1/completions", {"model": "fake", "prompt": "say x"}),
    ):
        seen.add(http.post(path, json=body).json()["system_fingerprint"])
        stream = http.post(path, json={**body, "stream": True})
        seen |= {event["system_fingerprint"] for event in sse_data(stream.content)}
    (fingerprint,) = seen
    assert fingerprint.startswith("fp_")


def test_embeddings_are_refused_in_words(http: httpx.Client) -> None:
    """A right request is told about the model, a wrong one about itself."""
    right = {"model": "fake", "input": ["a", "b"], "encoding_format": "base64"}
    error = http.post("/v1/embeddings", json=right).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "model")
    assert "embeddings" in error["message"]
    for fields, status, param in (
        ({"input": None}, 400, "input"),
        ({"dimensions": 0}, 400, "dimensions"),
        ({"model": "/other"}, 404, "model"),
    ):
        answer = http.post("/v1/embeddings", json={**right, **fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
