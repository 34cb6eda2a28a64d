"""Bodies of two megabytes that are nothing but structure: they are looked at off the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.clocks.held_call import HeldCall
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat

from machd.dialects.wire import raw_json
from machd.engine.fake.tokenizer import FakeTokenizer

_DEEP = "[" * 60 + "]" * 60
_FLAT_OBJECTS = '{"a":[' + ",".join(["{}"] * 600_000) + "]}"
_DEEP_LISTS = '{"a":[' + ",".join([_DEEP] * 16_000) + "]}"
_MAX_CONTAINERS = 20_000
"""Objects and arrays that one request may have in parts that stay JSON text."""


def _call(arguments: str) -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "c", "type": "function", "function": function}


def _chat_history(*calls: dict[str, object]) -> dict[str, object]:
    said = [
        {"role": "assistant", "tool_calls": calls[start : start + 128]}
        for start in range(0, len(calls), 128)
    ]
    return {**chat("hi", max_tokens=1), "messages": said}


def _ollama_history(arguments: str) -> bytes:
    call = f'{{"function": {{"name": "f", "arguments": {arguments}}}}}'
    said = f'{{"role": "assistant", "tool_calls": [{call}]}}'
    return f'{{"model": "fake", "messages": [{said}]}}'.encode()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One daemon for all bodies."""
    with RunningDaemon() as daemon:
        yield daemon.url


def _answer_while_held(url: str, held: HeldCall, path: str, body: object) -> httpx.Response:
    """Post a body, see that health is answered while the call is held, and return the body's answer."""
    with ThreadPoolExecutor(1) as pool, held:
        answer = pool.submit(httpx.post, url + path, json=body)
        held.wait_until_reached()
        assert httpx.get(f"{url}/health/live").status_code == 200
        assert not answer.done()
        held.may_go.set()
        return answer.result()


@pytest.mark.parametrize(
    "body",
    [
        _chat_history(_call(_FLAT_OBJECTS)),
        _chat_history(_call(_DEEP_LISTS)),
        _chat_history(*[_call(_DEEP_LISTS[:19_400] + "]}")] * 95),
        _chat_history(*[_call('{"a":1}')] * 19_000),
    ],
    ids=["flat objects", "deep lists", "deep lists in many calls", "small calls"],
)
def test_branched_body_is_refused_off_the_event_loop(
    url: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health is answered while its parts are counted, and no more of them become objects than may."""
    accepted: list[str] = []
    held = HeldCall(raw_json.Allowance.take)

    def take(allowance: raw_json.Allowance, raw: str, **kwargs: Any) -> None:
        held(allowance, raw, **kwargs)
        accepted.append(raw)  # and not refused: it is decoded next

    monkeypatch.setattr(raw_json.Allowance, "take", take)
    answer = _answer_while_held(url, held, "/v1/chat/completions", body)
    assert answer.status_code == 400
    assert sum(one.count("{") + one.count("[") for one in accepted) <= _MAX_CONTAINERS


@pytest.mark.parametrize("arguments", [_FLAT_OBJECTS, _DEEP_LISTS], ids=["flat", "deep"])
def test_branched_ollama_body_is_refused_off_the_event_loop(
    url: str, arguments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health is answered while the arguments of Ollama's calls, which are objects, are counted."""
    held = HeldCall(raw_json.Allowance.take)
    monkeypatch.setattr(raw_json.Allowance, "take", held.as_method())
    body = _ollama_history(arguments)
    with ThreadPoolExecutor(1) as pool, held:
        headers = {"Content-Type": "application/json"}
        answer = pool.submit(httpx.post, f"{url}/api/chat", content=body, headers=headers)
        held.wait_until_reached()
        assert httpx.get(f"{url}/health/live").status_code == 200
        assert not answer.done()
        held.may_go.set()
        assert answer.result().status_code == 400


def test_token_texts_of_a_long_prompt_are_made_off_the_event_loop(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Health is answered while the prompt's tokens become texts; the answer has all of them."""
    prompt = "ab " * 600_000
    held = HeldCall(FakeTokenizer.token_bytes)
    monkeypatch.setattr(FakeTokenizer, "token_bytes", held.as_method())
    body = {"prompt": prompt, "return_token_strs": True}
    answer = _answer_while_held(url, held, "/tokenize", body)
    assert answer.status_code == 200
    assert len(answer.json()["token_strs"]) == answer.json()["count"] == len(prompt)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/completions", "/api/chat"]
)
def test_unknown_model_is_told_before_other_mistakes(url: str, path: str) -> None:
    """A name that no model has is a 404, whatever else is wrong with the request."""
    body = {
        "model": "../other",
        "max_tokens": 1,
        "prompt": [[]],
        "messages": [{"role": "assistant", "content": ""}],
        "store": True,
        "container": "c",
        "format": "xml",
    }
    with httpx.Client(base_url=url) as http:
        assert http.post(path, json=body).status_code == 404
        assert http.post(path, json={**body, "model": "fake"}).status_code == 400
