"""What each of several models has of its own, and what they share, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.scraping import families_of
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat

_KEY = "k-0123456789abcdef01234567"
_NAMES = ("alpha", "beta")


@pytest.fixture(name="daemon")
def _daemon(tmp_path: Path) -> Iterator[SupervisedDaemon]:
    config = tmp_path / "machd.toml"
    tables = [f'[models.{name}]\npath = "fake?size=1000"' for name in _NAMES]
    config.write_text("\n".join(["[models]", *tables]))
    keys = tmp_path / "api-keys"
    keys.write_text(f"one:{_KEY}\n", "utf-8")
    keys.chmod(0o600)
    flags: dict[str, object] = {
        "continuous_batching.enabled": True,
        "continuous_batching.max_b": 8,
        "continuous_batching.coalesce": True,
        "cache.prefix": False,
        "auth.api_keys_file": str(keys),
        "limits.max_requests_per_key": 4,
    }
    with capture_logs(), SupervisedDaemon(flags, config_path=config) as daemon:
        yield daemon


def _client(daemon: SupervisedDaemon) -> httpx.Client:
    headers = {"Authorization": f"Bearer {_KEY}"}
    return httpx.Client(base_url=daemon.url, headers=headers, timeout=CEILING_S)


def _count(client: httpx.Client, name: str) -> dict[str, float]:
    """Samples of a counter by model."""
    family = families_of(client.get("/metrics").text)[name]
    return {one.labels["model"]: one.value for one in family.samples}


def test_a_conversation_goes_on_with_another_model(daemon: SupervisedDaemon) -> None:
    """A stored response is text: any model may continue it, and each says which one made it."""
    with _client(daemon) as client:

        def respond(model: str, text: str, **fields: object) -> dict[str, Any]:
            answer = client.post("/v1/responses", json={"model": model, "input": text, **fields})
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        first = respond("alpha", "say one")
        second = respond("beta", "say two", previous_response_id=first["id"])
        assert (first["model"], second["model"]) == _NAMES
        # The script says again what follows the first order in its prompt: the conversation so far.
        text = second["output"][0]["content"][0]["text"]
        assert text.splitlines() == ["one", "assistant: one", "user: say two"]
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        for one in (first, second):
            stored = client.get(f"/v1/responses/{one['id']}").json()
            assert stored["model"] == one["model"]


def test_equal_requests_are_coalesced_within_a_model(daemon: SupervisedDaemon) -> None:
    """Two that ask one model share a sequence; the same request to another model is computed by that."""
    text = "the same for all of them " * 8
    with _client(daemon) as client, ThreadPoolExecutor(4) as pool:
        for name in _NAMES:
            client.post("/v1/chat/completions", json=chat("say ready") | {"model": name})

        def ask(name: str) -> dict[str, Any]:
            body = chat(f"say {text}", temperature=0) | {"model": name}
            return dict(client.post("/v1/chat/completions", json=body).json())

        answers = list(pool.map(ask, ("alpha", "beta", "alpha", "beta")))
        assert [one["model"] for one in answers] == ["alpha", "beta", "alpha", "beta"]
        assert {one["choices"][0]["message"]["content"] for one in answers} == {text}
        wait_until(
            lambda: _count(client, "machd_coalesced_requests") == {"alpha": 1, "beta": 1},
            "one of two of each model",
        )


def test_each_model_compiles_its_own_grammars(daemon: SupervisedDaemon) -> None:
    """A schema that one model knows is compiled for the other's vocabulary, too, and holds there."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": schema | {"additionalProperties": False}},
    }
    with _client(daemon) as client:
        for name in (*_NAMES, "alpha"):
            body = chat("letters", response_format=response_format, max_tokens=60)
            answer = client.post("/v1/chat/completions", json=body | {"model": name}).json()
            assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}


def test_limits_of_a_key_are_the_daemons(daemon: SupervisedDaemon) -> None:
    """Requests that a client has open at one model count when it asks another."""
    long = "a long answer " * 60
    with _client(daemon) as client, ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(
                client.post,
                "/v1/chat/completions",
                json=chat(f"say {long}") | {"model": "alpha"},
            )
        wait_until(
            lambda: sum(_count(client, "machd_generations_open").values()) == 4, "they are open"
        )
        refused = client.post("/v1/chat/completions", json=chat("say no") | {"model": "beta"})
        assert refused.status_code == 429
