"""A checkpoint's sampling defaults apply to fields that the client leaves out, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.fake_engine import FakeEngine, spelled

from machd.engine.protocol.engine import ModelDescription
from machd.request.generation import DefaultSampling, SamplingParams

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PUBLISHED = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}
_CHAT = [{"role": "user", "content": "hi"}]


def _says_its_sampling(prompt: tuple[int, ...], sampling: SamplingParams, position: int) -> int:
    text = json.dumps({name: getattr(sampling, name) for name in _NAMES})
    return spelled(text)(prompt, sampling, position)


class _Published(FakeEngine):
    """A model whose publisher says how to sample."""

    @property
    def model(self) -> ModelDescription:
        return replace(super().model, default_sampling=DefaultSampling(0.6, 0.95, 20, 0.05, 1.05))


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A client of a daemon whose model's publisher says how to sample."""
    with (
        RunningDaemon(
            lambda: _Published(_says_its_sampling), {"limits.max_tokens_default": 200}
        ) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


def _asked(http: httpx.Client, dialect: str, **fields: object) -> Any:
    if dialect == "ollama":
        body: dict[str, object] = {"messages": _CHAT, "stream": False, "options": fields}
        answer = http.post("/api/chat", json={"model": "fake", **body})
        text = answer.json()["message"]["content"]
    elif dialect == "chat":
        answer = http.post(
            "/v1/chat/completions", json={"model": "fake", "messages": _CHAT, **fields}
        )
        text = answer.json()["choices"][0]["message"]["content"]
    elif dialect == "completions":
        answer = http.post("/v1/completions", json={"model": "fake", "prompt": "hi", **fields})
        text = answer.json()["choices"][0]["text"]
    elif dialect == "responses":
        answer = http.post("/v1/responses", json={"model": "fake", "input": "hi", **fields})
        text = answer.json()["output"][0]["content"][0]["text"]
        read = json.loads(text)
        assert answer.json()["temperature"] == read["temperature"]
        assert answer.json()["top_p"] == read["top_p"]
    else:
        answer = http.post(
            "/v1/messages",
            json={"model": "fake", "max_tokens": 200, "messages": _CHAT, **fields},
        )
        text = answer.json()["content"][0]["text"]
    assert answer.status_code == 200, answer.text
    return json.loads(text)


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages", "ollama"])
def test_checkpoints_values_hold_where_the_client_says_nothing(
    http: httpx.Client, dialect: str
) -> None:
    """A field that the client sends is the client's, one by one; temperature 0 is greedy."""
    assert _asked(http, dialect) == _PUBLISHED
    assert _asked(http, dialect, temperature=0, top_k=7) == {
        **_PUBLISHED,
        "temperature": 0,
        "top_k": 7,
    }
    assert _asked(http, dialect, top_p=1.0) == {**_PUBLISHED, "top_p": 1.0}


def test_fields_switched_off_by_the_client_are_off(http: httpx.Client) -> None:
    """Zeros and minus one are something that the client says."""
    read = _asked(http, "chat", top_k=-1, min_p=0, repetition_penalty=1.0)
    assert read == {**_PUBLISHED, "top_k": 0, "min_p": 0, "repetition_penalty": 1.0}
    assert _asked(http, "chat", top_p=0) == {**_PUBLISHED, "top_p": 1.0, "top_k": 1}


def test_checkpoints_values_are_shown(http: httpx.Client) -> None:
    """By the model's entry, and by llama.cpp's properties as what holds."""
    (model,) = http.get("/v1/models").json()["data"]
    assert model["default_sampling"] == _PUBLISHED
    params = http.get("/props").json()["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_k"]) == (0.6, 20)
    assert params["repeat_penalty"] == 1.05
