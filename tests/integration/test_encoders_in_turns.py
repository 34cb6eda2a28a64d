"""Encoders and a model that chats take turns in memory that holds one of them: none of their answers fails or changes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.checkpoints.tiny_encoder import write_tiny_embedder
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.engine_processes import engines_of
from support.daemon.operated_process import OperatedProcess, operated_process
from support.daemon.scraping import scrape

from machd.engine.loading.embedded_tokenizer import EMBEDDED_VOCABULARY_TOKENS

_ONE_ENCODER_GB = 0.004
"""A tiny encoder takes 2.7 MB beside others."""

_ONE_CHAT_GB = 0.032
"""A tiny model that chats takes 30.9 MB."""

_CONFIG = """
[models]
memory_gb = {memory_gb}
max_turn_s = 0.5
[models.one]
path = "{folder}/one"
[models.other]
path = "{folder}/{other}"
[models.other.continuous_batching]
kv_budget_gb = 0.001
"""
_CLIENTS = 4
_TEXTS = [f"text {'ab ' * (number % 6)}{number}" for number in range(200)]
_PROMPTS = [f"say {number}" for number in range(3)]


def _embed(http: httpx.Client, model: str, texts: list[str]) -> list[list[float]]:
    body = {"model": model, "input": texts}
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


def _complete(http: httpx.Client, prompt: str) -> str:
    body: dict[str, Any] = {"model": "other", "prompt": prompt, "max_tokens": 40, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0])


@pytest.fixture(name="serve")
def _serve(tmp_path: Path) -> Callable[..., Any]:
    write_tiny_embedder(tmp_path / "one")
    write_tiny_embedder(tmp_path / "embedder", seed=1)
    write_tiny_llama(tmp_path / "chat", vocabulary=EMBEDDED_VOCABULARY_TOKENS)

    def serve(other: str, memory_gb: float) -> Any:
        config = tmp_path / "machd.toml"
        config.write_text(_CONFIG.format(folder=tmp_path, other=other, memory_gb=memory_gb))
        return operated_process(config)

    return serve


def _loads(daemon: OperatedProcess) -> float:
    return scrape(daemon.server.url, "machd_model_loads_total", outcome="loaded")


def _is_same(vectors: list[list[float]], expected: list[list[float]]) -> bool:
    """Whether vectors are the same but for their last bits, which neighbours in a pass change."""
    return len(vectors) == len(expected) and all(
        one == pytest.approx(right, abs=1e-5) for one, right in zip(vectors, expected, strict=True)
    )


def test_two_encoders_share_the_memory_of_one(serve: Callable[..., Any]) -> None:
    """Requests to both at once wait for their model's turn, and have the vectors that they have alone."""
    with serve("embedder", _ONE_ENCODER_GB) as daemon, ThreadPoolExecutor(2 * _CLIENTS) as pool:
        alone = {name: _embed(daemon.http, name, _TEXTS) for name in ("one", "other")}
        assert not _is_same(alone["one"], alone["other"])
        assert len(engines_of(daemon.server.process.pid)) == 1
        before = _loads(daemon)
        answers = [
            (name, pool.submit(_embed, daemon.http, name, _TEXTS))
            for _ in range(_CLIENTS)
            for name in alone
        ]
        for name, answer in answers:
            assert _is_same(answer.result(CEILING_S), alone[name])
        assert _loads(daemon) > before
        assert scrape(daemon.server.url, "machd_requests_total", finish_reason="error") == 0


def test_an_encoder_and_a_model_that_chats_share_the_memory_of_one(
    serve: Callable[..., Any],
) -> None:
    """Neither cuts the other's answers."""
    with serve("chat", _ONE_CHAT_GB) as daemon, ThreadPoolExecutor(2 * _CLIENTS) as pool:
        vectors = _embed(daemon.http, "one", _TEXTS)
        texts = {prompt: _complete(daemon.http, prompt) for prompt in _PROMPTS}
        assert len(engines_of(daemon.server.process.pid)) == 1
        before = _loads(daemon)
        embedded = [pool.submit(_embed, daemon.http, "one", _TEXTS) for _ in range(_CLIENTS)]
        completed = {one: pool.submit(_complete, daemon.http, one) for one in _PROMPTS}
        for answer in embedded:
            assert _is_same(answer.result(CEILING_S), vectors)
        assert {one: answer.result(CEILING_S) for one, answer in completed.items()} == texts
        assert _loads(daemon) > before


def test_an_encoder_is_unloaded_and_loaded_again(serve: Callable[..., Any]) -> None:
    """While it is idle, and in the middle of a request, which goes on."""
    with serve("embedder", 1.0) as daemon, ThreadPoolExecutor(1) as pool:
        alone = _embed(daemon.http, "one", _TEXTS)
        daemon.command("/admin/models/one/unload")
        wait_until(lambda: not engines_of(daemon.server.process.pid), "its process has ended")
        assert _is_same(_embed(daemon.http, "one", _TEXTS), alone)
        answer = pool.submit(_embed, daemon.http, "one", _TEXTS * 10)
        wait_until(
            lambda: answer.done() or scrape(daemon.server.url, "machd_generations_open") == 1,
            "its texts are being computed",
        )
        daemon.command("/admin/models/one/unload", now=True)
        wait_until(lambda: not engines_of(daemon.server.process.pid), "its process has ended")
        # What is suspended waits until another request has the model loaded.
        assert _is_same(_embed(daemon.http, "one", _TEXTS[:1]), alone[:1])
        assert _is_same(answer.result(CEILING_S), alone * 10)
