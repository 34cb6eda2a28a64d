"""Bodies with images: longer than others may be, by what the images take and no more."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.clients.raw_client import RawClient
from support.clocks.polling import wait_until
from support.daemon.running_daemon import RunningDaemon

from machd.http import large_bodies
from machd.http.large_bodies import MAX_MEDIA_BODY_BYTES, BodyLease
from machd.served.served_model import ServedModel

_MIB = 1_048_576
_CHAT = "/v1/chat/completions"
_PHOTO = b64encode(b"\x00" * 5_000_000).decode()
_URL = f"data:image/jpeg;base64,{_PHOTO}"
_TOO_LONG_TEXT = "without its images and videos the body is longer than limits.max_body_bytes"


@pytest.fixture(name="text_model", scope="module")
def _text_model() -> Iterator[RunningDaemon]:
    """A daemon whose model takes text only."""
    with RunningDaemon() as daemon:
        yield daemon


@pytest.fixture(name="daemon")
def _daemon(monkeypatch: pytest.MonkeyPatch, text_model: RunningDaemon) -> RunningDaemon:
    """The same daemon, as if its model took images until they are looked at."""
    monkeypatch.setattr(ServedModel, "takes_media", True)
    return text_model


def _chat(*parts: object, **fields: object) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": list(parts)}], **fields}


_IMAGE = {"type": "image_url", "image_url": {"url": _URL}}
_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PHOTO}}
_OF_DIALECTS: dict[str, dict[str, Any]] = {
    _CHAT: _chat(_IMAGE),
    "/v1/responses": {
        "model": "fake",
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": _URL}]}],
    },
    "/v1/messages": {**_chat(_BLOCK), "max_tokens": 2},
    "/v1/messages/count_tokens": _chat(_BLOCK),
    "/tokenize": _chat(_IMAGE),
    "/api/chat": {
        "model": "fake",
        "messages": [{"role": "user", "content": "look", "images": [_PHOTO]}],
    },
    "/api/generate": {"model": "fake", "prompt": "look", "images": [_PHOTO]},
}


@pytest.mark.parametrize("path", _OF_DIALECTS)
def test_a_photo_of_5_mb_is_read_in_every_dialect(daemon: RunningDaemon, path: str) -> None:
    """The model decides about it, not the limit of bodies."""
    answer = httpx.post(daemon.url + path, json=_OF_DIALECTS[path])
    assert answer.status_code == 400
    assert "the served model takes text only" in answer.text


@pytest.mark.parametrize("path", _OF_DIALECTS)
def test_a_text_model_keeps_its_limit(text_model: RunningDaemon, path: str) -> None:
    """A body beyond limits.max_body_bytes is refused before it is read."""
    answer = httpx.post(text_model.url + path, json=_OF_DIALECTS[path])
    assert answer.status_code == 413
    assert "the body is longer than limits.max_body_bytes" in answer.text


_TOO_LONG: dict[str, tuple[str, bytes, str]] = {
    "text": (
        _CHAT,
        json.dumps(_chat({"type": "text", "text": "a" * 3 * _MIB})).encode(),
        _TOO_LONG_TEXT,
    ),
    "text beside an image": (
        _CHAT,
        json.dumps(_chat(_IMAGE, {"type": "text", "text": "a" * 3 * _MIB})).encode(),
        _TOO_LONG_TEXT,
    ),
    "text in a field that is not read": (
        _CHAT,
        json.dumps(_chat(_IMAGE, unknown="a" * 3 * _MIB)).encode(),
        _TOO_LONG_TEXT,
    ),
    "lists": (
        _CHAT,
        json.dumps(_chat({"type": "text", "text": "a"}))[:-1].encode()
        + b', "unknown": ['
        + b"[]," * _MIB
        + b"[]]}",
        _TOO_LONG_TEXT,
    ),
    "spaces": (_CHAT, b" " * 3 * _MIB + b"{}", _TOO_LONG_TEXT),
    "a prompt": (
        "/v1/completions",
        json.dumps({"model": "fake", "prompt": "a" * 3 * _MIB}).encode(),
        "the body is longer than limits.max_body_bytes",
    ),
    "an image beyond all": (
        _CHAT,
        b"a" * (MAX_MEDIA_BODY_BYTES + 1),
        f"more than {MAX_MEDIA_BODY_BYTES} bytes",
    ),
}


@pytest.mark.parametrize("name", _TOO_LONG)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["with a length", "chunked"])
def test_what_is_no_image_has_the_limit_of_text(
    daemon: RunningDaemon, name: str, *, is_chunked: bool
) -> None:
    """Neither text nor structure passes limits.max_body_bytes in the shadow of an image."""
    path, body, said = _TOO_LONG[name]
    content = iter([body]) if is_chunked else body
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(daemon.url + path, content=content, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert said in answer.text
    assert httpx.get(f"{daemon.url}/health").status_code == 200


def test_large_bodies_together_have_a_limit(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body beyond it is refused with Retry-After, small ones are served, and room comes back."""
    monkeypatch.setattr(large_bodies, "MAX_HELD_BYTES", 8_000_000)
    body = json.dumps(_OF_DIALECTS[_CHAT]).encode()
    headers = {"Content-Type": "application/json"}

    def answer_to_large() -> httpx.Response:
        return httpx.post(daemon.url + _CHAT, content=body, headers=headers)

    held_bytes = [0]
    grow_to = BodyLease.grow_to

    def grow_and_tell(lease: BodyLease, body_bytes: int) -> None:
        grow_to(lease, body_bytes)
        held_bytes.append(body_bytes)

    monkeypatch.setattr(BodyLease, "grow_to", grow_and_tell)
    with RawClient(daemon.url) as client:
        client.request("POST", _CHAT, body[:-1], {**headers, "Content-Length": str(len(body))})
        wait_until(lambda: max(held_bytes) >= len(body) - 1, "the first body is held")
        refused = answer_to_large()
        assert refused.json()["error"]["code"] == "too_many_in_flight"
        assert refused.headers["retry-after"]
        small = _chat({"type": "text", "text": "say ok"})
        assert httpx.post(daemon.url + _CHAT, json=small).status_code == 200
    wait_until(lambda: answer_to_large().status_code == 400, "its room is free again")
    assert answer_to_large().status_code == 400
