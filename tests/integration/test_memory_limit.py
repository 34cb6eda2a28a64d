"""A load that exceeds a limit on the process's memory ends no daemon."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from polling import CEILING_S
from serve_process import ServeProcess
from tiny_checkpoint import write_tiny_llama

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
    return write_tiny_llama(path, layers=8, head_dim=128, kv_heads=16)


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


def _answers(url: str, bodies: list[dict[str, object]]) -> list[list[httpx.Response]]:
    """All answers to each request: clients repeat what was refused, after the time that they are told."""
    with (
        httpx.Client(base_url=url, timeout=CEILING_S) as client,
        ThreadPoolExecutor(_CLIENTS) as pool,
    ):

        def ask(body: dict[str, object]) -> list[httpx.Response]:
            answers: list[httpx.Response] = []
            while len(answers) < CEILING_S:
                answers.append(client.post("/v1/chat/completions", json=body))
                if answers[-1].status_code != 503:
                    break
                time.sleep(int(answers[-1].headers["retry-after"]))
            return answers

        return list(pool.map(ask, bodies))


def _text(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("requests", [32, pytest.param(200, marks=pytest.mark.long)])
def test_load_beyond_a_memory_limit_is_answered_or_refused(checkpoint: Path, requests: int) -> None:
    """Requests are refused as ``overloaded``, and in the end get the answer of a daemon without a limit."""
    bodies = _bodies(requests)
    with _daemon(checkpoint) as daemon:
        idle_bytes = psutil.Process(daemon.process.pid).memory_info().vms
        expected = [_text(one) for (one,) in _answers(daemon.url, bodies)]

    limit_kib = (idle_bytes + _ROOM_BYTES) // 1024
    with _daemon(checkpoint, ulimit=f"-v {limit_kib}") as daemon:
        answers = _answers(daemon.url, bodies)
        assert daemon.process.poll() is None, "".join(daemon.output[-20:])

    refused = [one for several in answers for one in several[:-1]]
    assert Counter(several[-1].status_code for several in answers) == {200: requests}
    assert [_text(several[-1]) for several in answers] == expected
    assert {one.json()["error"]["code"] for one in refused} <= {"overloaded"}
    assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
    assert [one for one in daemon.events if one["event"] == "engine.memory_short"], (
        "the load did exceed the limit"
    )
    faults = [one for one in daemon.events if one["level"] in {"error", "critical"}]
    assert faults == [], json.dumps(faults)[:4000]
