"""Messages through Anthropic's own client, streamed and whole, and failures in its envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic
from structlog.testing import capture_logs
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.dialogue import chat, told
from support.engines.fake_engine import FakeEngine, FakeFaults, spelled
from support.engines.step_gate import StepGate, at_decode

from machd.request.generation import SamplingParams

_MESSAGES = "/v1/messages"
_COUNT = "/v1/messages/count_tokens"
_KEY = "k-0123456789abcdef"
_CANARY = "xyzzy-canary"
_WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
_CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
_CASES = [
    pytest.param({"content": "say Hello, world."}, id="natural end"),
    pytest.param({"content": "say Größe 寿司 🍣 e\u0301"}, id="many bytes a character"),
    pytest.param({"content": "say "}, id="nothing"),
    pytest.param({"content": "hi", "max_tokens": 33}, id="greedy"),
    pytest.param({"content": "say one STOP two", "stop_sequences": ["STOP"]}, id="stopped"),
    pytest.param({"content": "say 🍣", "max_tokens": 3}, id="cut inside a character"),
]


def _script(prompt: tuple[int, ...], sampling: SamplingParams, position: int) -> int:
    """Calls the tool when asked for the weather, thinks when told to, else obeys."""
    text = bytes(prompt).decode()
    if "\ntool: " in text:
        return spelled("It is sunny.")(prompt, sampling, position)
    if "weather?" in text:
        return spelled(_CALLED)(prompt, sampling, position)
    if text.endswith("<think>"):
        return spelled("hm</think>done")(prompt, sampling, position)
    return told(prompt, sampling, position)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for whatever needs no special settings."""
    with RunningDaemon(lambda: FakeEngine(_script)) as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: RunningDaemon) -> Iterator[Anthropic]:
    """Anthropic's client, which never tries again."""
    with Anthropic(base_url=daemon.url, api_key="none", max_retries=0, timeout=CEILING_S) as opened:
        yield opened


@pytest.fixture(scope="module")
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    """A plain client of the same daemon."""
    with httpx.Client(base_url=daemon.url) as opened:
        yield opened


def _body(content: object = "say ok", **fields: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "fake", "max_tokens": 100, "messages": messages, **fields}


def _check(answer: httpx.Response, status: int, family: str) -> str:
    """Assert the status and Anthropic's envelope; returns the message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    return _check_envelope(answer.json(), family, answer.headers["request-id"])


def _check_envelope(body: Any, family: str, request_id: str) -> str:
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["request_id"]) == ("error", request_id)
    assert body["error"].keys() == {"type", "message"}
    assert body["error"]["type"] == family
    message = body["error"]["message"]
    assert isinstance(message, str)
    assert message
    assert _CANARY not in message
    return message


# --- answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", _CASES)
def test_a_stream_says_what_the_whole_answer_says(
    client: Anthropic, fields: dict[str, Any]
) -> None:
    """Content, stop reasons and usage do not depend on ``stream``."""
    body = _body(**fields, extra_body={"temperature": 0})  # the client has no word for it any more
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert streamed.to_dict().keys() >= whole.to_dict().keys()
    for name in ("type", "role", "model", "stop_reason", "stop_sequence", "usage"):
        assert getattr(streamed, name) == getattr(whole, name), name
    assert [block.to_dict() for block in streamed.content] == [
        {**block.to_dict(), **({"parsed_output": None} if "parsed_output" in one.to_dict() else {})}
        for block, one in zip(whole.content, streamed.content, strict=True)
    ]


async def test_the_asynchronous_client_reads_the_same(daemon: RunningDaemon) -> None:
    """The asynchronous client gets the same text from a stream and from a whole answer."""
    async with AsyncAnthropic(
        base_url=daemon.url, api_key="none", max_retries=0, timeout=CEILING_S
    ) as opened:
        whole = await opened.messages.create(**_body("say Hello"))
        async with opened.messages.stream(**_body("say Hello")) as stream:
            text = await stream.get_final_text()
    assert [block.type for block in whole.content] == ["text"]
    assert text == "Hello"


def test_the_beta_client_is_served_too(client: Anthropic) -> None:
    """Headers and a query that ask for betas are taken and change nothing."""
    answer = client.beta.messages.create(**_body("say beta"), betas=["whatever-2099-01-01"])
    assert [block.type for block in answer.content] == ["text"]
    counted = client.beta.messages.count_tokens(
        model="fake", messages=[{"role": "user", "content": "say beta"}]
    )
    assert counted.input_tokens == answer.usage.input_tokens


def test_an_answer_has_anthropics_shape(client: Anthropic) -> None:
    """A whole answer carries its id, its end and its tokens as Anthropic's API does."""
    answer = client.messages.create(**_body("say hello", system="be kind"))
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "hello"}]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens == len("system: be kind\nuser: say hello\nassistant: ")
    assert answer.usage.output_tokens == len("hello") + 1  # and the end of text
    assert (answer.usage.cache_read_input_tokens, answer.usage.cache_creation_input_tokens) == (
        0,
        0,
    )
    assert answer._request_id


def test_a_stop_sequence_is_named(client: Anthropic) -> None:
    """The answer says which of the sequences ended it, and does not hold it."""
    answer = client.messages.create(**_body("say one STOP two", stop_sequences=["x", "STOP"]))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "one "}]
    assert client.messages.create(**_body("hi", max_tokens=3)).stop_reason == "max_tokens"


def test_the_events_of_a_stream_on_the_wire(http: httpx.Client) -> None:
    """Named events in Anthropic's order, line feeds alone, and no ``[DONE]``."""
    answer = http.post(
        _MESSAGES,
        json=_body("say a", stream=True),
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "whatever-2099-01-01"},
    )
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert b"\r" not in answer.content
    assert b"[DONE]" not in answer.content
    frames = [frame.split("\n") for frame in answer.text.removesuffix("\n\n").split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in frames]
    data = [json.loads(line.removeprefix("data: ")) for _, line in frames]
    assert [one["type"] for one in data] == names
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert data[0]["message"]["usage"]["input_tokens"] == len("user: say a\nassistant: ")


def test_silence_is_filled_with_pings() -> None:
    """A slow model's stream carries ping events, which Anthropic's client skips."""
    gate = StepGate(at_decode)
    flags = {"streaming.keepalive_s": 0.05}
    with RunningDaemon(lambda: FakeEngine(told, before_step=gate), flags) as slow, gate:
        body = _body("say ab", stream=True)
        with httpx.stream("POST", f"{slow.url}{_MESSAGES}", json=body, timeout=CEILING_S) as answer:
            seen = ""
            for text in answer.iter_text():
                seen += text
                if seen.count("event: ping\n") >= 3:
                    gate.open()
    assert seen.count("event: ping\n") >= 3
    assert seen.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


# --- conversations ----------------------------------------------------------------------------


def test_a_prefilled_answer_goes_on(client: Anthropic) -> None:
    """A final message of the assistant's is the beginning of the answer."""
    body = _body()
    body["messages"] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "say more"},
    ]
    answer = client.messages.create(**body)
    assert answer.usage.input_tokens == len("user: hi\nassistant: say more")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "more"}]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_round_of_tools(client: Anthropic, is_stream: bool) -> None:  # noqa: FBT001
    """A call comes as a block with its input, and its result leads to an answer."""
    body = _body("weather?", tools=[_WEATHER])
    if is_stream:
        with client.messages.stream(**body) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = client.messages.create(**body)
    (call,) = answer.content
    assert answer.stop_reason == "tool_use"
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})
    assert call.id.startswith("toolu_")
    body["messages"] += [
        {"role": "assistant", "content": [call.to_dict()]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}],
        },
    ]
    last = client.messages.create(**body)
    assert [block.to_dict() for block in last.content] == [{"type": "text", "text": "It is sunny."}]
    assert last.stop_reason == "end_turn"


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_are_blocks_of_their_own(client: Anthropic, is_stream: bool) -> None:  # noqa: FBT001
    """Thinking comes before the answer, and only when it is asked for."""
    body = _body("hi", thinking={"type": "enabled", "budget_tokens": 50})
    if is_stream:
        with client.messages.stream(**body) as stream:
            answer: Any = stream.get_final_message()
    else:
        answer = client.messages.create(**body)
    thought, text = answer.content
    assert (thought.type, thought.thinking, thought.signature) == ("thinking", "hm", "")
    assert text.text == "done"
    plain = client.messages.create(**_body("say plain"))
    assert [block.type for block in plain.content] == ["text"]


def test_an_answer_follows_its_schema(client: Anthropic) -> None:
    """A schema shapes the answer whatever the model would have said."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [7]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer: Any = client.messages.create(
        **_body("say no", output_config={"format": {"type": "json_schema", "schema": schema}})
    )
    assert json.loads(answer.content[0].text) == {"a": 7}


def test_counting_counts_the_prompt(client: Anthropic) -> None:
    """The count is that of the prompt that the same body has, tools and all."""
    body = _body("say hello", system="be kind", tools=[_WEATHER])
    del body["max_tokens"]
    counted = client.messages.count_tokens(**body).input_tokens
    assert counted == client.messages.create(**body, max_tokens=5).usage.input_tokens
    assert counted > client.messages.count_tokens(**{**body, "tools": []}).input_tokens


def test_messages_are_counted_under_their_own_name(daemon: RunningDaemon) -> None:
    """Metrics tell these requests from those of other endpoints."""
    before = scrape(daemon.url, "machd_requests_total", endpoint="messages")
    httpx.post(f"{daemon.url}{_MESSAGES}", json=_body())
    wait_until(
        lambda: scrape(daemon.url, "machd_requests_total", endpoint="messages") == before + 1,
        "the request is counted",
    )


# --- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [_MESSAGES, _COUNT])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": _CANARY} | {"model": 1},
        {"messages": []},
        {"messages": [{"role": _CANARY, "content": _CANARY}]},
        {"messages": [{"role": "assistant", "content": _CANARY}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": _CANARY}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
        {"mcp_servers": [{"url": _CANARY}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "tool", "name": _CANARY}},
    ],
)
def test_bad_requests(http: httpx.Client, path: str, fields: dict[str, object]) -> None:
    """A mistake in a body is a 400 in Anthropic's envelope that quotes nothing."""
    _check(http.post(path, json=_body(**fields)), 400, "invalid_request_error")


def _nested(depth: int, place: str) -> bytes:
    deep = '{"a":' * depth + "1" + "}" * depth
    return json.dumps(_body(**{place: 0})).replace(f'"{place}": 0', f'"{place}": {deep}').encode()


_HOSTILE = {
    "empty": b"",
    "no object": b"[]",
    "not UTF-8": b'{"model": "\xff"}',
    "half a surrogate": b'{"model": "\\ud800"}',
    "deep messages": b'{"messages":' + b"[" * 100_000,
    "deep closed": b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep system": _nested(100_000, "system"),
    "deep tools": _nested(5_000, "tools"),
    "deep unknown field": _nested(100_000, "zzz"),
    "many messages": json.dumps(_body(messages=[{"role": "user", "content": "x"}] * 8193)).encode(),
    "many blocks": json.dumps(_body([{"type": "text", "text": "x"}] * 1025)).encode(),
    "huge number": json.dumps(_body()).replace("100", "9" * 5000).encode(),
    "deep schema": json.dumps(
        _body(tools=[{"name": "a", "input_schema": json.loads('{"a":' * 300 + "1" + "}" * 300)}])
    ).encode(),
    "many results of no call": json.dumps(
        _body([{"type": "tool_result", "tool_use_id": str(i)} for i in range(1024)])
    ).encode(),
}


@pytest.mark.parametrize("name", _HOSTILE)
@pytest.mark.parametrize("path", [_MESSAGES, _COUNT])
def test_hostile_body_is_refused(http: httpx.Client, path: str, name: str) -> None:
    """A hostile body gets a short 400, and the next request is served."""
    answer = http.post(path, content=_HOSTILE[name], headers={"Content-Type": "application/json"})
    if name == "huge number" and path == _COUNT:
        assert answer.status_code in (200, 400)  # max_tokens is none of its fields
    else:
        _check(answer, 400, "invalid_request_error")
    assert len(answer.content) < 2000
    assert http.post(path, json=_body()).status_code == 200


@pytest.mark.parametrize("path", [_MESSAGES, _COUNT])
def test_another_model_is_not_found(http: httpx.Client, client: Anthropic, path: str) -> None:
    """A name that is no model's is a 404 that names the served one."""
    message = _check(http.post(path, json=_body(model="file://claude")), 404, "not_found_error")
    assert "fake" in message
    with pytest.raises(anthropic.NotFoundError) as error:
        client.messages.create(**_body() | {"model": "file://claude"})
    assert error.value.type == "not_found_error"


@pytest.mark.parametrize("path", [f"{_MESSAGES}/x", f"{_MESSAGES}/batches", f"{_COUNT}/x"])
def test_unknown_paths_below(http: httpx.Client, path: str) -> None:
    """Paths below the endpoint get errors in Anthropic's envelope."""
    _check(http.post(path, json={}), 404, "not_found_error")


@pytest.mark.parametrize("path", [_MESSAGES, _COUNT])
def test_other_ways_to_ask_wrongly(http: httpx.Client, path: str) -> None:
    """Methods, media types, hosts and origins are refused in Anthropic's envelope too."""
    _check(http.get(path), 405, "invalid_request_error")
    headers = {"Content-Type": "text/plain"}
    _check(http.post(path, content=b"{}", headers=headers), 415, "invalid_request_error")
    _check(http.post(path, json={}, headers={"Host": "evil.example"}), 421, "invalid_request_error")
    _check(
        http.post(path, json={}, headers={"Origin": "https://evil.example"}),
        403,
        "permission_error",
    )


def test_too_long_bodies_and_full_houses() -> None:
    """A body beyond the limit is a 413, and a request too many a 503, in Anthropic's envelope."""
    gate = StepGate()
    flags = {"limits.max_body_bytes": 4096, "limits.max_in_flight": 1}
    with (
        RunningDaemon(lambda: FakeEngine(told, before_step=gate), flags) as small,
        RawClient(small.url) as running,
        gate,
    ):
        _check(
            httpx.post(f"{small.url}{_MESSAGES}", json=_body("x" * 5000)), 413, "request_too_large"
        )
        running.post_json(_MESSAGES, _body())
        gate.wait_until_held()
        answer = httpx.post(f"{small.url}{_MESSAGES}", json=_body())
        _check(answer, 503, "overloaded_error")
        assert int(answer.headers["retry-after"]) >= 1
        gate.open()
        assert running.read_answer().status == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_full_queue_is_a_rate_limit(is_stream: bool) -> None:  # noqa: FBT001
    """Beyond ``limits.max_queue`` a request gets 429 with Retry-After, in Anthropic's envelope."""
    gate = StepGate()
    with (
        RunningDaemon(lambda: FakeEngine(told, before_step=gate), {"limits.max_queue": 1}) as small,
        RawClient(small.url) as running,
        RawClient(small.url) as waiting,
        RawClient(small.url) as refused,
        gate,
    ):
        running.post_json(_MESSAGES, _body("hi", max_tokens=1000, stream=True))
        gate.wait_until_held()
        waiting.post_json(_MESSAGES, _body())
        gate.step_until(
            lambda: scrape(small.url, "machd_requests_waiting") == 1, "one request waits"
        )
        refused.post_json(_MESSAGES, _body(stream=is_stream))
        gate.step_until(lambda: refused.is_answered, "the next one is refused")
        answer = refused.read_answer()
        assert answer.status == 429
        assert int(answer.headers["retry-after"]) >= 1
        _check_envelope(answer.json(), "rate_limit_error", answer.headers["request-id"])
        running.reset()
        gate.open()
        assert waiting.read_answer().status == 200


def test_keys(tmp_path: Path) -> None:
    """Anthropic's client is let in by its own header; without a key it is a 401 of its own."""
    keys = tmp_path / "keys"
    keys.write_text(f"one:{_KEY}\n")
    with RunningDaemon(lambda: FakeEngine(told), {"auth.api_keys_file": str(keys)}) as locked:
        _check(httpx.post(f"{locked.url}{_MESSAGES}", json=_body()), 401, "authentication_error")
        with Anthropic(base_url=locked.url, api_key=_KEY, max_retries=0) as opened:
            assert opened.messages.create(**_body()).stop_reason == "end_turn"
        with (
            Anthropic(base_url=locked.url, api_key=_KEY + "x", max_retries=0) as refused,
            pytest.raises(anthropic.AuthenticationError),
        ):
            refused.messages.create(**_body())


def test_a_fault_mid_stream_is_an_error_event() -> None:
    """Text before the fault arrives, then an error that Anthropic's client raises."""
    faults = FakeFaults(row_errors={(0, 2): RuntimeError(_CANARY)})
    with (
        capture_logs(),
        RunningDaemon(lambda: FakeEngine(told, faults=faults)) as faulty,
        Anthropic(base_url=faulty.url, api_key="none", max_retries=0) as opened,
    ):
        seen: list[str] = []
        with (
            pytest.raises(anthropic.APIStatusError) as error,
            opened.messages.stream(**_body("say abc")) as stream,
        ):
            seen.extend(stream.text_stream)
        assert "".join(seen) == "ab"
        body: Any = error.value.body
        _check_envelope(body, "api_error", error.value.response.headers["request-id"])


def test_other_paths_keep_openais_envelope(http: httpx.Client) -> None:
    """Only this endpoint's own paths speak Anthropic's dialect, headers included."""
    for path in ("/v1/messagesx", "/v1/chat/completions", "/v1/message", "/messagesx"):
        answer = http.post(path, json=chat(messages=[]))
        assert answer.json().keys() == {"error"}
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert "request-id" not in answer.headers
