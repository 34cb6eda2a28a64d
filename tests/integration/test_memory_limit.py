"""A load that exceeds a limit on the process's memory costs no answer."""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.checkpoints.tiny_checkpoint import write_tiny_llama
from support.clocks.polling import CEILING_S
from support.daemon.engine_processes import engine_of
from support.daemon.serve_process import ServeProcess

from machd.engine.loading.embedded_tokenizer import EMBEDDED_VOCABULARY_TOKENS

_WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "river",
    "stone",
    "light",
    "house",
    "green",
    "winter",
    "engine",
    "memory",
]
_CLIENTS = 8
_ROOM_BYTES = 600_000_000
"""Memory beyond what an idle daemon takes: the KV of four or five of the longest requests."""


@pytest.fixture(name="checkpoint", scope="module")
def _checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that computes little and keeps 131 KB of keys and values a token."""
    path = tmp_path_factory.mktemp("wide") / "wide"
    return write_tiny_llama(
        path, vocabulary=EMBEDDED_VOCABULARY_TOKENS, layers=8, head_dim=128, kv_heads=16
    )


def _daemon(checkpoint: Path, *, ulimit: str | None = None) -> ServeProcess:
    return ServeProcess(
        str(checkpoint),
        "--continuous-batching",
        "--continuous-batching-max-b=8",
        "--continuous-batching-kv-budget-gb=20",
        # So that both runs compute every token in the same way.
        "--speculation-mode=off",
        ulimit=ulimit,
    )


def _bodies(count: int) -> list[dict[str, object]]:
    """Conversations of 200 to 700 words, and short answers."""
    source = random.Random(14)
    return [
        {
            "model": "wide",
            "messages": [
                {
                    "role": "user",
                    "content": " ".join(source.choices(_WORDS, k=source.randint(200, 700))),
                }
            ],
            "max_tokens": source.randint(4, 24),
            "temperature": 0,
        }
        for _ in range(count)
    ]


def _answers(url: str, bodies: list[dict[str, object]], *, clients: int) -> list[httpx.Response]:
    with (
        httpx.Client(base_url=url, timeout=CEILING_S) as client,
        ThreadPoolExecutor(clients) as pool,
    ):
        return list(pool.map(lambda body: client.post("/v1/chat/completions", json=body), bodies))


def _text(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize("requests", [16, pytest.param(200, marks=pytest.mark.longest)])
def test_load_beyond_a_memory_limit_is_answered(checkpoint: Path, requests: int) -> None:
    """Every request gets the answer that it gets without a limit: rows are suspended, and resumed."""
    bodies = _bodies(requests)
    # Started as the limited one is: one that was forked has other addresses in use.
    with _daemon(checkpoint, ulimit="-v unlimited") as daemon:
        idle_bytes = engine_of(daemon.process.pid).memory_info().vms
        expected = [_text(one) for one in _answers(daemon.url, bodies, clients=_CLIENTS)]

    limit_kib = (idle_bytes + _ROOM_BYTES) // 1024
    with _daemon(checkpoint, ulimit=f"-v {limit_kib}") as daemon:
        answers = _answers(daemon.url, bodies, clients=_CLIENTS)
        assert daemon.process.poll() is None, "".join(daemon.output[-20:])
        # What is left when the load is over is enough for what fits alone.
        (last,) = _answers(daemon.url, bodies[:1], clients=1)

    outcomes = Counter(answer.status_code for answer in answers)
    wrong = [
        index
        for index, (answer, text) in enumerate(zip(answers, expected, strict=True))
        if answer.status_code == 200 and _text(answer) != text
    ]
    assert wrong == [], outcomes
    assert outcomes == {200: requests}
    assert (last.status_code, _text(last)) == (200, expected[0])
    assert [one for one in daemon.events if one["event"] == "engine.memory_short"], (
        "the load did exceed the limit"
    )
    faults = [one for one in daemon.events if one["level"] in {"error", "critical"}]
    assert faults == [], json.dumps(faults)[:4000]
