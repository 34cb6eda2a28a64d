"""Images that clients send to a running daemon: decoded off the event loop, refused by a text model."""

from __future__ import annotations

import threading
from binascii import a2b_base64
from collections.abc import Iterator

import httpx
import pytest
from support.daemon.running_daemon import RunningDaemon

from machd.engine.fake.tokenizer import FakeTokenizer

_DATA = "QUJDRA=="
_DATA_URL = f"data:image/png;base64,{_DATA}"
_SOURCE = {"type": "base64", "media_type": "image/png", "data": _DATA}


@pytest.fixture(name="http", scope="module")
def _http() -> Iterator[httpx.Client]:
    """A client of a daemon whose model takes text only."""
    with RunningDaemon() as daemon, httpx.Client(base_url=daemon.url) as client:
        yield client


def _shown(part: dict[str, object]) -> list[dict[str, object]]:
    return [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]


_CHAT_MESSAGES = _shown({"type": "image_url", "image_url": {"url": _DATA_URL}})
_BLOCKS = _shown({"type": "image", "source": _SOURCE})
_ITEMS = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "look"},
            {"type": "input_image", "image_url": _DATA_URL},
        ],
    }
]
_OLLAMA_MESSAGES = [{"role": "user", "content": "look", "images": [_DATA]}]

# Path, body, and the field of the image.
_ASKED: dict[str, tuple[dict[str, object], str]] = {
    "/v1/chat/completions": ({"messages": _CHAT_MESSAGES}, "messages[0].content[1].image_url.url"),
    "/v1/responses": ({"input": _ITEMS}, "input[0].content[1].image_url"),
    "/v1/messages": (
        {"messages": _BLOCKS, "max_tokens": 2},
        "messages[0].content[1].source.data",
    ),
    "/v1/messages/count_tokens": ({"messages": _BLOCKS}, "messages[0].content[1].source.data"),
    "/tokenize": ({"messages": _CHAT_MESSAGES}, "messages[0].content[1].image_url.url"),
    "/api/chat": ({"messages": _OLLAMA_MESSAGES}, "messages[0].images[0]"),
    "/api/generate": ({"prompt": "look", "images": [_DATA]}, "images[0]"),
}


@pytest.mark.parametrize("path", _ASKED)
def test_an_image_to_a_text_model_is_refused_once_it_is_decoded_in_a_worker_thread(
    http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every dialect decodes base64 off the event loop and names the field and what to do instead."""
    threads: list[str] = []

    def decode(data: str, /, *, strict_mode: bool) -> bytes:
        threads.append(threading.current_thread().name)
        return a2b_base64(data, strict_mode=strict_mode)

    monkeypatch.setattr("machd.dialects.wire.media.a2b_base64", decode)
    body, param = _ASKED[path]
    answer = http.post(path, json={"model": "fake", **body})
    assert answer.status_code == 400
    assert f"{param}: the served model takes text only" in answer.text
    assert "or send text" in answer.text
    assert _DATA not in answer.text
    assert threads
    assert all(name.startswith("machd-tokeniser") for name in threads)


_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_RESULTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [
                    {"type": "text", "text": "seen"},
                    {"type": "image_url", "image_url": {"url": _DATA_URL}},
                ],
            },
        ],
        "max_tokens": 2,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "look"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [
                    {"type": "input_text", "text": "seen"},
                    {"type": "input_image", "image_url": _DATA_URL},
                ],
            },
        ],
        "max_output_tokens": 2,
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [
                            {"type": "text", "text": "seen"},
                            {"type": "image", "source": _SOURCE},
                        ],
                    }
                ],
            },
        ],
        "max_tokens": 2,
    },
    "/api/chat": {
        "messages": [
            {"role": "user", "content": "look"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
            },
            {"role": "tool", "tool_name": "look", "content": "seen", "images": [_DATA]},
        ],
        "stream": False,
        "options": {"num_predict": 2},
    },
}


@pytest.mark.parametrize("path", _RESULTS)
def test_an_image_in_a_tools_result_is_named_to_a_text_model(
    http: httpx.Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that has looked at a picture goes on: a word stands in its place, and a header says so."""
    rendered: list[str] = []
    render = FakeTokenizer.render_chat

    def noting(self: FakeTokenizer, *arguments: object, **named: object) -> str:
        rendered.append(render(self, *arguments, **named))  # type: ignore[arg-type]
        return rendered[-1]

    monkeypatch.setattr(FakeTokenizer, "render_chat", noting)
    answer = http.post(path, json={"model": "fake", **_RESULTS[path]})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-omitted-images"] == "1"
    assert "seen" in rendered[-1]
    assert "[image]" in rendered[-1]


@pytest.mark.parametrize("path", _RESULTS)
def test_an_image_in_a_tools_result_is_refused_where_that_is_set(path: str) -> None:
    """``vision.in_tool_results``."""
    with RunningDaemon(flags={"vision.in_tool_results": "refuse"}) as daemon:
        answer = httpx.post(f"{daemon.url}{path}", json={"model": "fake", **_RESULTS[path]})
    assert answer.status_code == 400
    assert "takes text only" in answer.text


def test_images_of_ollama_without_a_prompt_do_not_only_load_the_model(http: httpx.Client) -> None:
    """An image is never dropped in silence."""
    answer = http.post("/api/generate", json={"model": "fake", "images": [_DATA]})
    assert answer.status_code == 400
    assert "images[0]" in answer.json()["error"]
