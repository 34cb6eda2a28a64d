"""The real process, the real model, eight rows: every shaped answer has its shape, plain ones stay."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clients.shaped_requests import ShapedRequest, shaped_requests
from support.clocks.polling import CEILING_S
from support.daemon.scraping import scrape
from support.daemon.serve_process import ServeProcess

_MODEL = "smollm2-135m-instruct"
_MAX_TOKENS = 56
_CLIENTS = 8
_PLAIN_REQUESTS = 8


@pytest.fixture(name="server", scope="module")
def _server(embedded_model_path: Path) -> Iterator[ServeProcess]:
    """One daemon for the module, eight rows wide."""
    assert embedded_model_path.is_file()
    with ServeProcess("--continuous-batching", "--continuous-batching-max-b", "8") as server:
        yield server


def _plain(number: int) -> dict[str, object]:
    """A request for any text; greedy, or with a seed."""
    sampling: dict[str, object] = (
        {"temperature": 0} if number % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": number}
    )
    return {
        "model": _MODEL,
        "prompt": f"Here is story {number}. Once upon a time,",
        "max_tokens": 16,
        "logprobs": 0,
        **sampling,
    }


def _tokens(client: httpx.Client, body: dict[str, object]) -> list[str]:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokens: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
    return tokens


def _answer(client: httpx.Client, request: ShapedRequest) -> tuple[str, str]:
    """Text and finish reason."""
    answer = client.post(request.path, json={"model": _MODEL, **request.body})
    assert answer.status_code == 200, (request.body, answer.text)
    choice: dict[str, Any] = answer.json()["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text or "", choice["finish_reason"]


def _plain_until(
    done: threading.Event, client: httpx.Client, numbers: Iterator[int]
) -> list[tuple[int, list[str]]]:
    """One plain neighbour: it asks again and again until the shaped requests are done."""
    told = []
    while not done.is_set():
        number = next(numbers) % _PLAIN_REQUESTS
        told.append((number, _tokens(client, _plain(number))))
    return told


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "plain_clients"),
    [
        (24, 4),
        pytest.param(200, 2, marks=pytest.mark.longest),
    ],
)
def test_every_finished_answer_has_its_shape_and_neighbours_are_not_touched(
    server: ServeProcess, record_property: Any, count: int, plain_clients: int
) -> None:
    """All answers that ended validate; all plain ones are, token by token, what they are alone."""
    requests = shaped_requests(count, random.Random(count), max_tokens=_MAX_TOKENS)
    done = threading.Event()
    numbers = itertools.count()
    with (
        httpx.Client(base_url=server.url, timeout=CEILING_S) as client,
        ThreadPoolExecutor(_CLIENTS - plain_clients) as shaped,
        ThreadPoolExecutor(plain_clients) as plain,
    ):
        alone = [_tokens(client, _plain(number)) for number in range(_PLAIN_REQUESTS)]
        neighbours = [
            plain.submit(_plain_until, done, client, numbers) for _ in range(plain_clients)
        ]
        try:
            answers = list(shaped.map(lambda one: _answer(client, one), requests))
        finally:
            done.set()
        told = [pair for one in neighbours for pair in one.result()]
    counts = Counter(reason for _, reason in answers)
    ended = [
        (request, text)
        for request, (text, reason) in zip(requests, answers, strict=True)
        if reason != "length"
    ]
    wrong = [(request.body, text) for request, text in ended if not request.has_shape(text)]
    record_property("finish_reasons", dict(counts))
    record_property("plain_answers", len(told))
    print(f"shaped: {dict(counts)}, valid: {len(ended) - len(wrong)}, plain: {len(told)}")  # noqa: T201
    assert not wrong
    assert set(counts) <= {"stop", "length"}
    assert len(ended) >= 0.8 * count, "too few answers have ended to prove anything"
    assert len(told) >= 2 * plain_clients
    assert [number for number, tokens in told if tokens != alone[number]] == []
    assert scrape(server.url, "machd_faults_total") == 0
    steps = scrape(server.url, "machd_batch_width_count")
    assert steps - scrape(server.url, "machd_batch_width_bucket", le="4.0") > 20, "wide batches"
