"""Ollama's API over HTTP: lines of JSON, whole answers, facts of the model, and its envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.dialogue import told
from support.engines.fake_engine import FakeEngine, FakeFaults, spelled
from support.engines.step_gate import StepGate, at_decode, at_prefill

from machd.engine.fake.tokenizer import FakeTokenizer
from machd.request.generation import SamplingParams

_CHAT = "/api/chat"
_GENERATE = "/api/generate"
_KEY = "k-0123456789abcdef"
_CANARY = "xyzzy-canary"
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
_CALL = '<tool_call>{"name": "weather", "arguments": {"city":\n "Paris"}}</tool_call>'
_CALLED = {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}
_CASES = [
    pytest.param("say Hello, world.", {}, "Hello, world.", "stop", id="natural end"),
    pytest.param("say Größe 寿司 🍣", {}, "Größe 寿司 🍣", "stop", id="many bytes a character"),
    pytest.param("say one STOP two", {"stop": ["STOP"]}, "one ", "stop", id="stopped"),
    pytest.param("say abcdef", {"num_predict": 3}, "abc", "length", id="cut"),
]


def _script(prompt: tuple[int, ...], sampling: SamplingParams, position: int) -> int:
    """Calls the tool when asked for the weather, thinks when told to, else obeys."""
    text = bytes(prompt).decode()
    if "\ntool: " in text:
        return spelled("It is sunny.")(prompt, sampling, position)
    if "weather?" in text:
        return spelled(_CALL)(prompt, sampling, position)
    if "storm?" in text:
        return spelled(_CALL + '<tool_call>{"name": "weather", "arguments": {"ci')(
            prompt, sampling, position
        )
    if text.endswith("<think>"):
        return spelled("hm</think>done")(prompt, sampling, position)
    return told(prompt, sampling, position)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for whatever needs no special settings."""
    with RunningDaemon(lambda: FakeEngine(_script)) as running:
        yield running


@pytest.fixture(scope="module")
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    """A client of that daemon."""
    with httpx.Client(base_url=daemon.url) as opened:
        yield opened


def _chat(content: str = "hi", **fields: object) -> dict[str, object]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}


def _generate(prompt: str = "hi", **fields: object) -> dict[str, object]:
    return {"model": "fake", "prompt": prompt, **fields}


def _lines(answer: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream, one on each line and nothing beside them."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    *lines, rest = answer.content.split(b"\n")
    assert rest == b""
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("content", "options", "text", "reason"), _CASES)
def test_chat_stream_says_what_the_whole_answer_says(
    http: httpx.Client, content: str, options: dict[str, object], text: str, reason: str
) -> None:
    """Ollama's default is a stream; its parts make the whole, and its last line tells how it ended."""
    *parts, last = _lines(http.post(_CHAT, json=_chat(content, options=options)))
    whole = http.post(_CHAT, json=_chat(content, options=options, stream=False)).json()
    assert "".join(part["message"]["content"] for part in parts) == text
    assert {part["message"]["role"] for part in [*parts, last]} == {"assistant"}
    assert not any(part["done"] for part in parts)
    assert last["message"]["content"] == ""
    assert whole["message"] == {"role": "assistant", "content": text}
    for end in (last, whole):
        assert (end["model"], end["done"], end["done_reason"]) == ("fake", True, reason)
        assert end["eval_count"] > 0
        assert end["prompt_eval_count"] == len(f"user: {content}\nassistant: ".encode())


@pytest.mark.parametrize(("prompt", "options", "text", "reason"), _CASES)
def test_generate_stream_says_what_the_whole_answer_says(
    http: httpx.Client, prompt: str, options: dict[str, object], text: str, reason: str
) -> None:
    """A prompt is answered as a user's message, in ``response``."""
    *parts, last = _lines(http.post(_GENERATE, json=_generate(prompt, options=options)))
    whole = http.post(_GENERATE, json=_generate(prompt, options=options, stream=False)).json()
    assert "".join(part["response"] for part in parts) == text
    assert whole["response"] == text
    assert (last["response"], last["done_reason"]) == ("", reason)
    assert whole["done_reason"] == reason
    assert whole["prompt_eval_count"] == len(f"user: {prompt}\nassistant: ".encode())


def test_raw_prompt_is_continued_as_it_stands(http: httpx.Client) -> None:
    """``raw`` keeps the chat template away; ``system`` stands before a prompt that is not raw."""
    raw = http.post(_GENERATE, json=_generate("say abc", raw=True, stream=False)).json()
    assert (raw["response"], raw["prompt_eval_count"]) == ("abc", len("say abc"))
    told = http.post(_GENERATE, json=_generate("say abc", system="hm", stream=False)).json()
    assert told["prompt_eval_count"] == len("system: hm\nuser: say abc\nassistant: ")


def test_times_are_those_of_the_request(http: httpx.Client) -> None:
    """The durations add up, and are those that the log has of the same request."""
    with capture_logs() as log:
        answer = http.post(_CHAT, json=_chat("say abcdefgh", stream=False)).json()
        wait_until(
            lambda: any(one["event"] == "request.finished" for one in log), "it is written down"
        )
    (finished,) = [one for one in log if one["event"] == "request.finished"]
    assert finished["endpoint"] == "ollama_chat"
    assert answer["load_duration"] == 0
    assert answer["prompt_eval_duration"] > 0
    assert answer["eval_duration"] > 0
    before_first_token_ms = (answer["total_duration"] - answer["eval_duration"]) / 1_000_000
    assert before_first_token_ms == pytest.approx(finished["ttft_ms"], abs=0.1)
    assert answer["eval_count"] == finished["completion_tokens"]


def test_times_are_there_when_the_first_token_ends_the_text() -> None:
    """An answer of one token that is none of its text took the time of its prompt."""
    with RunningDaemon(lambda: FakeEngine(spelled(""))) as daemon:
        answer = httpx.post(
            f"{daemon.url}{_CHAT}", json=_chat("hi", stream=False), timeout=CEILING_S
        ).json()
    assert (answer["eval_count"], answer["eval_duration"]) == (1, 0)
    assert 0 < answer["prompt_eval_duration"] <= answer["total_duration"]


def test_thoughts_stand_apart_from_the_answer(http: httpx.Client) -> None:
    """With ``think``, thoughts are in ``thinking`` on both endpoints, streamed and whole."""
    *parts, _ = _lines(http.post(_CHAT, json=_chat("x", think=True)))
    assert "".join(part["message"].get("thinking", "") for part in parts) == "hm"
    assert "".join(part["message"]["content"] for part in parts) == "done"
    whole = http.post(_CHAT, json=_chat("x", think="high", stream=False)).json()
    assert whole["message"] == {"role": "assistant", "content": "done", "thinking": "hm"}
    generated = http.post(_GENERATE, json=_generate("x", think=True, stream=False)).json()
    assert (generated["thinking"], generated["response"]) == ("hm", "done")


def test_a_round_of_tools(http: httpx.Client) -> None:
    """A call comes in one line with its arguments as an object; its result is answered."""
    body = _chat("weather?", tools=[_WEATHER])
    *parts, last = _lines(http.post(_CHAT, json=body))
    (call,) = [call for part in parts for call in part["message"].get("tool_calls", [])]
    assert call["function"] == _CALLED
    assert last["done_reason"] == "stop"
    whole = http.post(_CHAT, json={**body, "stream": False}).json()["message"]
    assert (whole["content"], whole["tool_calls"][0]["function"]) == ("", _CALLED)
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": _CALLED}]}
    messages = [{"role": "user", "content": "weather?"}, said, result]
    answer = http.post(_CHAT, json={**body, "messages": messages, "stream": False}).json()
    assert answer["message"] == {"role": "assistant", "content": "It is sunny."}


@pytest.mark.parametrize("stream", [False, True])
def test_call_that_the_model_left_unfinished_is_none(http: httpx.Client, *, stream: bool) -> None:
    """A second call whose arguments have no end is the text of a whole answer; a stream has none of it."""
    answer = http.post(_CHAT, json=_chat("storm?", tools=[_WEATHER], stream=stream))
    messages = [line["message"] for line in (_lines(answer) if stream else [answer.json()])]
    calls = [call["function"] for one in messages for call in one.get("tool_calls", [])]
    assert calls == [_CALLED]
    text = "".join(one["content"] for one in messages)
    assert text.startswith("" if stream else '<tool_call>{"name": "weather"')
    assert ("<tool_call>" in text) is not stream


def test_logprobs_are_told_once_for_every_token(http: httpx.Client) -> None:
    """Streamed or whole, each token of the text has its entry with the alternatives asked for."""
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    lines = _lines(http.post(_CHAT, json=_chat("say abc", **fields)))
    whole = http.post(_CHAT, json=_chat("say abc", stream=False, **fields)).json()
    streamed = [entry for line in lines for entry in line.get("logprobs", [])]
    assert streamed == whole["logprobs"]
    assert "".join(entry["token"] for entry in streamed) == "abc"
    assert {len(entry["top_logprobs"]) for entry in streamed} == {2}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            _CHAT,
            {"model": "fake", "messages": []},
            {"message": {"role": "assistant", "content": ""}},
        ),
        (_CHAT, {"model": "fake"}, {"message": {"role": "assistant", "content": ""}}),
        (_GENERATE, {"model": "fake", "prompt": "", "keep_alive": "5m"}, {"response": ""}),
        (_GENERATE, {"model": "fake"}, {"response": ""}),
    ],
)
def test_request_without_text_says_that_the_model_is_loaded(
    http: httpx.Client, path: str, body: dict[str, object], said: dict[str, object]
) -> None:
    """Nothing is generated; the answer is one object, whether a stream is asked for or not."""
    answer = http.post(path, json=body)
    assert answer.headers["content-type"] == "application/json"
    told = answer.json()
    assert told.pop("created_at").endswith("Z")
    assert told == {"model": "fake", "done": True, "done_reason": "load", **said}


def test_facts_of_the_model_agree_with_the_other_endpoints(http: httpx.Client) -> None:
    """Ollama's endpoints describe the model as ``/v1/capabilities`` does."""
    facts = http.get("/v1/capabilities").json()
    (listed,) = http.get("/api/tags").json()["models"]
    (running,) = http.get("/api/ps").json()["models"]
    shown = http.post("/api/show", json={"model": "fake"}).json()
    architecture, model = facts["architecture"], facts["model"]
    assert listed["name"] == listed["model"] == running["model"] == model["id"]
    assert listed["size"] == running["size"] == model["weights_bytes"]
    assert running["context_length"] == model["context_tokens"]
    assert running["size_vram"] == 0
    assert listed["digest"] == running["digest"]
    assert len(bytes.fromhex(listed["digest"])) == 32
    assert listed["details"] == running["details"] == shown["details"]
    assert listed["details"]["family"] == architecture
    assert shown["model_info"] == {
        "general.architecture": architecture,
        "general.parameter_count": model["parameters"],
        f"{architecture}.context_length": model["context_tokens"],
        f"{architecture}.vocab_size": model["vocabulary_tokens"],
    }
    assert ("tools" in shown["capabilities"]) == facts["features"]["tools"]
    assert ("thinking" in shown["capabilities"]) == facts["features"]["reasoning"]
    assert http.post("/api/show", json={"name": "fake", "verbose": True}).json() == shown
    assert http.get("/api/version").json()["machd"] == facts["versions"]["machd"]


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/api/pull", "--model-path"),
        ("POST", "/api/push", "--model-path"),
        ("POST", "/api/create", "--model-path"),
        ("POST", "/api/copy", "--model-path"),
        ("DELETE", "/api/delete", "--model-path"),
        ("HEAD", "/api/blobs/sha256:0", ""),
        ("GET", "/api/nothing", "/api/chat"),
    ],
)
def test_rest_of_ollamas_api_says_what_to_do(
    http: httpx.Client, method: str, path: str, hint: str
) -> None:
    """An endpoint that needs more than one model is a 404 in Ollama's envelope, with the way out."""
    answer = http.request(method, path, json=None if method == "HEAD" else {"model": "fake"})
    assert answer.status_code == 404
    if method != "HEAD":
        assert answer.json().keys() == {"error"}
        assert hint in answer.json()["error"]


def test_mistakes_are_told_in_ollamas_envelope(http: httpx.Client) -> None:
    """A message and nothing else, whatever the status; it quotes nothing of the body."""
    statuses = {
        200: http.post(_CHAT, json=_chat("say a", stream=False)),
        400: http.post(_CHAT, json=_chat(format=_CANARY)),
        404: http.post(_CHAT, json={**_chat(), "model": f"/{_CANARY}"}),
        405: http.get(_CHAT),
        415: http.post(_CHAT, content=json.dumps(_chat()), headers={"Content-Type": "text/plain"}),
    }
    for status, answer in statuses.items():
        assert answer.status_code == status
        if status != 200:
            assert answer.json().keys() == {"error"}
            assert _CANARY not in answer.text
    assert statuses[405].headers["allow"] == "POST"
    assert "-H 'Content-Type: application/json'" in statuses[415].json()["error"]


def test_prompt_beyond_the_context_is_refused_before_a_stream() -> None:
    """A prompt that does not fit is a 400 on both endpoints, streamed or not."""
    with RunningDaemon(lambda: FakeEngine(told, context_tokens=100)) as small:
        for path, body in ((_CHAT, _chat("x" * 200)), (_GENERATE, _generate("x" * 200))):
            answer = httpx.post(small.url + path, json=body)
            assert answer.status_code == 400
            assert "100" in answer.json()["error"]


def test_prompt_is_continued_where_the_model_has_no_template(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model has no chat template, and shows no tools: ``generate`` continues the text."""
    monkeypatch.setattr(FakeTokenizer, "has_chat_template", False)
    answer = http.post(_GENERATE, json=_generate("say abc", stream=False)).json()
    assert (answer["response"], answer["prompt_eval_count"]) == ("abc", len("say abc"))
    assert "tools" not in http.post("/api/show", json={}).json()["capabilities"]


def test_failure_inside_a_stream_is_its_last_line() -> None:
    """A row that fails after its first tokens ends the stream with an ``error`` line."""
    gate = StepGate(at_decode)
    faults = FakeFaults(row_errors={(0, 2): ValueError(_CANARY)})
    with (
        capture_logs(),
        RunningDaemon(lambda: FakeEngine(told, faults=faults, before_step=gate)) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        client.post_json(_CHAT, _chat("say abcdef"))
        for letter in (b'"a"', b'"b"'):
            gate.wait_until_held()
            client.read_until(letter)
            gate.let()
        answer = client.read_answer()
        gate.open()
    *parts, last = [json.loads(line) for line in answer.body.splitlines()]
    assert "".join(part["message"]["content"] for part in parts) == "ab"
    assert last.keys() == {"error"}
    assert _CANARY not in last["error"]


def test_long_silence_is_filled_with_lines_that_say_nothing() -> None:
    """While a prompt is computed, lines with empty content keep the connection, and are valid."""
    gate = StepGate(at_prefill)
    flags = {"streaming.keepalive_s": 0.02}
    with (
        RunningDaemon(lambda: FakeEngine(told, before_step=gate), flags) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        client.post_json(_GENERATE, _generate("say abc"))
        gate.wait_until_held()
        client.read_until(b'"response":""')
        gate.open()
        answer = client.read_answer()
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert lines[0]["response"] == ""
    assert not lines[0]["done"]
    assert "".join(line["response"] for line in lines) == "abc"


def test_client_that_leaves_frees_its_slot() -> None:
    """A stream whose client goes away is aborted, under the endpoint's own name."""
    gate = StepGate(at_decode)
    with (
        RunningDaemon(lambda: FakeEngine(before_step=gate, context_tokens=100_000)) as daemon,
        gate,
    ):
        with RawClient(daemon.url) as client:
            client.post_json(_CHAT, _chat("hi", options={"num_predict": 90_000}))
            gate.wait_until_held()
            client.read_until(b'"content"')
            client.reset()
        labels = {"endpoint": "ollama_chat", "finish_reason": "abort"}
        wait_until(
            lambda: scrape(daemon.url, "machd_requests_total", **labels) == 1, "it is aborted"
        )
        gate.open()
        wait_until(lambda: scrape(daemon.url, "machd_requests_running") == 0, "its slot is free")


def test_key_is_asked_for_in_ollamas_envelope(tmp_path: Path) -> None:
    """Ollama's client sends its key as a bearer; without one the answer is a 401."""
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{_KEY}\n")
    keys.chmod(0o600)
    with RunningDaemon(flags={"auth.api_keys_file": str(keys)}) as locked:
        for path in ("/api/tags", "/api/version", "/api/ps"):
            refused = httpx.get(locked.url + path)
            assert refused.status_code == 401
            assert "API key" in refused.json()["error"]
            key = {"Authorization": f"Bearer {_KEY}"}
            assert httpx.get(locked.url + path, headers=key).status_code == 200
