"""Requests of clients that mean well: what is read tolerantly, and what is said about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat, completion
from support.engines.fake_engine import FakeEngine

_CHAT = "/v1/chat/completions"
_SCHEMA = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "not": {"required": ["x"]},
}
_FORMAT = {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}
_FUNCTION = {
    "name": "math.add",
    "parameters": {"type": "object", "properties": {"a": {"const": 1}}},
}


@pytest.fixture(name="client", scope="module")
def _client() -> Iterator[httpx.Client]:
    with (
        RunningDaemon(lambda: FakeEngine(context_tokens=400)) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


@pytest.mark.parametrize("max_tokens", [8000, 32_000, 2**31 - 1, -1, 4000.0])
def test_more_tokens_than_fit_are_as_many_as_fit(client: httpx.Client, max_tokens: float) -> None:
    """A completion longer than the context's rest ends with ``length`` there, in each dialect."""
    free = {"ignore_eos": True}
    answer = client.post(_CHAT, json=chat("say x", max_tokens=max_tokens, **free)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 400
    body = completion("say x", max_tokens=max_tokens, **free)
    answer = client.post("/v1/completions", json=body).json()
    assert answer["usage"]["total_tokens"] == 400
    body = {"input": "hi", "max_output_tokens": max_tokens}
    assert client.post("/v1/responses", json=body).status_code == 200
    if max_tokens > 0:
        body = {**chat("hi"), "max_tokens": int(max_tokens)}
        assert client.post("/v1/messages", json=body).status_code == 200


def test_prompt_that_does_not_fit_is_still_refused(client: httpx.Client) -> None:
    """A prompt longer than the context is a 400, whatever is asked of the completion."""
    for max_tokens in (1, 8000, -1):
        answer = client.post(_CHAT, json=chat("x" * 500, max_tokens=max_tokens))
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_keywords_that_no_grammar_holds_are_named_in_a_header(
    client: httpx.Client,
    stream: bool,  # noqa: FBT001
) -> None:
    """The answer comes, and its header lists what of the schema it need not follow."""
    body = chat("hi", response_format=_FORMAT, stream=stream, max_tokens=20)
    answer = client.post(_CHAT, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-schema-keywords"] == "not, uniqueItems"
    plain = client.post(_CHAT, json=chat("hi", response_format={"type": "json_object"}))
    assert "x-ignored-schema-keywords" not in plain.headers


def test_keywords_that_no_grammar_holds_are_refused_when_strict() -> None:
    """With ``structured_output.strict`` such a schema is a 400 that names keywords and field."""
    with RunningDaemon(flags={"structured_output.strict": True}) as daemon:
        for path, body, param in (
            (_CHAT, chat("hi", response_format=_FORMAT), "response_format.json_schema.schema"),
            ("/v1/completions", completion("hi", guided_json=_SCHEMA), "guided_json"),
        ):
            answer = httpx.post(f"{daemon.url}{path}", json=body, timeout=CEILING_S)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "invalid_grammar")
            assert error["param"] == param
            assert "not, uniqueItems" in error["message"]


def test_oldest_turns_are_dropped_when_truncation_is_auto(client: httpx.Client) -> None:
    """A conversation that is too long loses its oldest turns, and a header says how many messages."""
    turns: list[dict[str, Any]] = []
    for index in range(6):
        turns += [
            {"role": "user", "content": f"{index} " + "x" * 60},
            {"role": "assistant", "content": "ok"},
        ]
    turns.append({"role": "user", "content": "say last"})
    body = {"input": turns, "instructions": "Be brief.", "max_output_tokens": 8}
    refused = client.post("/v1/responses", json=body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answer = client.post("/v1/responses", json={**body, "truncation": "auto"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == "auto"
    dropped = int(answer.headers["x-dropped-messages"])
    assert 0 < dropped < len(turns)
    assert dropped % 2 == 0, "whole turns go"
    assert answer.json()["usage"]["input_tokens"] <= 300
    short = client.post("/v1/responses", json={"input": "hi", "truncation": "auto"})
    assert "x-dropped-messages" not in short.headers


def test_prompt_is_cut_to_its_end_when_asked(client: httpx.Client) -> None:
    """``truncate_prompt_tokens`` keeps a text's last tokens and a conversation's latest turns."""
    body = completion("x" * 1000, max_tokens=2, truncate_prompt_tokens=50)
    assert client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 50
    body = completion("x" * 1000, max_tokens=2, truncate_prompt_tokens=-1)
    assert client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == 300
    body = chat("x" * 100, truncate_prompt_tokens=20)
    error = client.post(_CHAT, json=body).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"


def test_messages_without_content_are_read(client: httpx.Client) -> None:
    """Null, no parts and refusals are texts, an empty one among them."""
    messages = [
        {"role": "system", "content": None},
        {"role": "user", "content": []},
        {"role": "assistant"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "hi"},
    ]
    answer = client.post(_CHAT, json={**chat(), "messages": messages})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_legacy_functions_are_answered_as_they_were(client: httpx.Client, stream: bool) -> None:  # noqa: FBT001
    """``functions`` and ``function_call`` give a ``function_call``, and its result is read again."""
    body = chat(
        "add",
        functions=[_FUNCTION],
        function_call={"name": "math.add"},
        stream=stream,
        max_tokens=200,
    )
    answer = client.post(_CHAT, json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        lines = [one[6:] for one in answer.text.splitlines() if one.startswith("data: {")]
        choices = [json.loads(one)["choices"][0] for one in lines]
        parts = [
            one["delta"]["function_call"] for one in choices if "function_call" in one["delta"]
        ]
        call = {"name": parts[0]["name"], "arguments": "".join(one["arguments"] for one in parts)}
        reason = choices[-1]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        call, reason = choice["message"]["function_call"], choice["finish_reason"]
        assert "tool_calls" not in choice["message"]
    assert (call["name"], reason) == ("math.add", "function_call")
    json.loads(call["arguments"])
    history = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "math.add", "content": "3"},
    ]
    again = client.post(_CHAT, json={**chat(), "messages": history, "functions": [_FUNCTION]})
    assert again.status_code == 200, again.text


def test_many_stops_and_tools_are_taken(client: httpx.Client) -> None:
    """64 stops of 512 characters and 512 tools are within bounds, one more is not."""
    tools = [{"type": "function", "function": {"name": f"mcp.server.tool_{i}"}} for i in range(513)]
    for fields, status in (
        ({"stop": ["x" * 512] * 64}, 200),
        ({"stop": ["x" * 513]}, 400),
        ({"stop": ["x"] * 65}, 400),
        ({"tools": tools[:512], "tool_choice": "none"}, 200),
        ({"tools": tools, "tool_choice": "none"}, 400),
    ):
        assert client.post(_CHAT, json=chat(**fields)).status_code == status


@pytest.mark.parametrize("stream", [False, True])
def test_stored_chat_completion_is_kept_with_its_metadata(
    client: httpx.Client,
    stream: bool,  # noqa: FBT001
) -> None:
    """``store: true`` keeps the answer, streamed or whole, until it is deleted; false keeps nothing."""
    body = chat("say kept", store=True, metadata={"run": "7"}, stream=stream, seed=1)
    answer = client.post(_CHAT, json=body)
    assert answer.status_code == 200, answer.text
    if stream:
        first = json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))
        whole = client.post(_CHAT, json={**body, "stream": False, "store": False}).json()
        identity = first["id"]
        assert client.get(f"{_CHAT}/{whole['id']}").status_code == 404
    else:
        whole = answer.json()
        identity = whole["id"]
        assert whole["metadata"] == {"run": "7"}
    kept = client.get(f"{_CHAT}/{identity}").json()
    assert (kept["id"], kept["metadata"]) == (identity, {"run": "7"})
    assert kept["choices"] == whole["choices"]
    assert client.get(f"/v1/responses/{identity}").status_code == 404
    deleted = client.delete(f"{_CHAT}/{identity}").json()
    assert deleted == {"id": identity, "object": "chat.completion.deleted", "deleted": True}
    assert client.get(f"{_CHAT}/{identity}").status_code == 404
