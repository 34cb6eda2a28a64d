"""Images that clients send to a running daemon: decoded off the event loop, refused by a text model."""

from __future__ import annotations

import threading
from binascii import a2b_base64
from collections.abc import Iterator

import httpx
import pytest
from support.daemon.running_daemon import RunningDaemon

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


def test_images_of_ollama_without_a_prompt_do_not_only_load_the_model(http: httpx.Client) -> None:
    """An image is never dropped in silence."""
    answer = http.post("/api/generate", json={"model": "fake", "images": [_DATA]})
    assert answer.status_code == 400
    assert "images[0]" in answer.json()["error"]
