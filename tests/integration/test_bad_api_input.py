"""Mistakes that only show deep inside a request: told soon, in the right dialect, to its sender alone."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from bad_requests import (
    BAD_REQUESTS,
    HEAVY_REQUESTS,
    PATHS,
    BadRequest,
    error_of,
    valid_body,
)
from paced_daemon import paced_daemon
from polling import CEILING_S
from running_daemon import RunningDaemon
from scraping import scrape

from machd.engine.protocol import Engine

_LIMIT_S = 1.0
_HEAVY_LIMIT_S = 5.0
_HEALTH_P99_S = 0.05
_MAX_GAP_STEPS = 15
"""A third of a second: two cores are shared by the daemon, four clients and the machine's other load."""
_JSON = {"Content-Type": "application/json"}


@pytest.fixture(name="url", scope="module")
def _url() -> Iterator[str]:
    """A daemon with a scripted model."""
    with RunningDaemon() as daemon:
        yield daemon.url


@pytest.fixture(name="http", scope="module")
def _http(url: str) -> Iterator[httpx.Client]:
    """A client of that daemon."""
    with httpx.Client(base_url=url, timeout=CEILING_S) as client:
        yield client


def _post(http: httpx.Client, bad: BadRequest) -> tuple[httpx.Response, float]:
    """The answer, and how long it took in seconds."""
    before_s = time.perf_counter()
    answer = http.post(bad.path, content=bad.body, headers=_JSON)
    return answer, time.perf_counter() - before_s


@pytest.mark.parametrize("bad", BAD_REQUESTS, ids=str)
def test_a_mistake_is_told_within_a_second(http: httpx.Client, bad: BadRequest) -> None:
    """A 400 in the dialect's own envelope, whose message is short, and whole in itself."""
    answer, took_s = _post(http, bad)
    assert answer.status_code == 400, answer.text
    assert took_s < _LIMIT_S
    error = error_of(bad.path, answer.json())
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(answer.content) < 2000


@pytest.mark.parametrize("heavy", HEAVY_REQUESTS, ids=str)
def test_what_is_heavy_is_answered_or_refused(http: httpx.Client, heavy: BadRequest) -> None:
    """Within the bounds, though made to be slow: no failure of ours, and soon decided."""
    answer, took_s = _post(http, heavy)
    assert answer.status_code in (200, 400), answer.text
    assert took_s < _HEAVY_LIMIT_S
    if answer.status_code == 400:
        error_of(heavy.path, answer.json())


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_cannot_be_is_no_stream(http: httpx.Client, path: str) -> None:
    """What is wrong is known before a stream begins, so its status tells."""
    bad = next(one for one in BAD_REQUESTS if one.path == path)
    body = bad.body[:-1] + b', "stream": true}'
    answer = http.post(path, content=body, headers=_JSON)
    assert answer.status_code == 400
    assert answer.headers["Content-Type"].startswith("application/json")
    error_of(path, answer.json())


def test_nobody_else_notices() -> None:
    """All of it at once from two senders: health answers at once, and a running stream goes on.

    What a busy machine does to both before the storm is allowed for.
    """
    health_s: list[float] = []
    arrivals_s: list[float] = []
    with paced_daemon() as url:
        with _running(_poll_health, url, health_s), _running(_read_stream, url, arrivals_s):
            _wait_for(arrivals_s, 100)
            calm_health, calm_arrivals = len(health_s), len(arrivals_s)
            senders = [
                threading.Thread(target=_send_all, args=(url, requests))
                for requests in (BAD_REQUESTS, tuple(reversed(BAD_REQUESTS)))
            ]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()
            storm_health, storm_arrivals = len(health_s), len(arrivals_s)
        assert scrape(url, "machd_faults_total") == 0
        with httpx.Client(base_url=url, timeout=CEILING_S) as client:
            for path in PATHS:
                assert client.post(path, json=valid_body(path)).status_code == 200
    calm = _gaps(arrivals_s[:calm_arrivals])
    gaps_s = _gaps(arrivals_s[calm_arrivals:storm_arrivals])
    calm_p99_s = _p99(health_s[:calm_health])
    p99_s = _p99(health_s[calm_health:storm_health])
    print(  # noqa: T201
        f"health p99 {p99_s * 1000:.1f} ms, before {calm_p99_s * 1000:.1f} ms; gaps: median "
        f"{statistics.median(gaps_s) * 1000:.1f} ms, max {max(gaps_s) * 1000:.1f} ms, before "
        f"{max(calm) * 1000:.1f} ms, of {len(gaps_s)}"
    )
    assert len(gaps_s) > 30
    assert p99_s < max(_HEALTH_P99_S, 3 * calm_p99_s)
    assert max(gaps_s) < max(_MAX_GAP_STEPS * statistics.median(gaps_s), 3 * max(calm))


def _gaps(moments_s: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(moments_s)]


def _p99(times_s: list[float]) -> float:
    return sorted(times_s)[int(len(times_s) * 0.99)]


def _send_all(url: str, requests: tuple[BadRequest, ...]) -> None:
    with httpx.Client(base_url=url, timeout=CEILING_S) as client:
        for one in requests:
            assert client.post(one.path, content=one.body, headers=_JSON).status_code == 400


def _poll_health(url: str, took_s: list[float], done: threading.Event) -> None:
    with httpx.Client(base_url=url, timeout=CEILING_S) as client:
        while not done.is_set():
            before_s = time.perf_counter()
            assert client.get("/health").status_code == 200
            took_s.append(time.perf_counter() - before_s)
            done.wait(0.005)


def _read_stream(url: str, arrivals_s: list[float], done: threading.Event) -> None:
    body = valid_body("/v1/completions", stream=True, max_tokens=90_000, ignore_eos=True)
    with (
        httpx.Client(base_url=url, timeout=CEILING_S) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        for line in stream.iter_lines():
            if line.startswith("data: "):
                arrivals_s.append(time.perf_counter())
            if done.is_set():
                return


@contextmanager
def _running(
    work: Callable[[str, list[float], threading.Event], None], url: str, moments_s: list[float]
) -> Iterator[None]:
    """Work on another thread until the block ends."""
    done = threading.Event()
    thread = threading.Thread(target=work, args=(url, moments_s, done))
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(CEILING_S)


def _wait_for(moments_s: list[float], count: int) -> None:
    deadline_s = time.perf_counter() + 20
    while len(moments_s) < count:
        assert time.perf_counter() < deadline_s, "nothing comes"
        time.sleep(0.01)


_STERN = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if message.content == 'divide' %}{{ 1 // 0 }}{% endif %}"
    "{% if message.content == 'lose' %}{{ message.none.at_all }}{% endif %}"
    "{% if message.content == 'fall' %}{{ 'x' + 1 }}{% endif %}"
    "{{ message.content + '\n' }}{% endfor %}"
)


def _stern_engine() -> Engine:
    """A tiny model whose chat template refuses whatever does not alternate."""
    from tiny_models import TinyKind, tiny_model  # noqa: PLC0415

    from machd.engine.mlx_engine import MlxEngine  # noqa: PLC0415 - mlx belongs to the engine thread
    from machd.engine.tokenizer import MlxTokenizer  # noqa: PLC0415 - the same

    model = tiny_model(TinyKind.STANDARD)
    assert isinstance(model.tokenizer, MlxTokenizer)
    model.tokenizer.wrapped._tokenizer.chat_template = _STERN
    return MlxEngine(model)


@pytest.fixture(name="stern", scope="module")
def _stern() -> Iterator[httpx.Client]:
    """A client of a daemon with that model."""
    with (
        RunningDaemon(_stern_engine) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


_TWO_QUESTIONS = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
_REFUSED_BY_TEMPLATE = [
    pytest.param(
        "/v1/chat/completions", {"messages": _TWO_QUESTIONS}, "alternate", id="chat order"
    ),
    pytest.param(
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]},
        "alternate",
        id="chat begins with the assistant",
    ),
    pytest.param(
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]},
        "System role",
        id="chat system",
    ),
    pytest.param("/v1/responses", {"input": _TWO_QUESTIONS}, "alternate", id="responses order"),
    pytest.param(
        "/v1/responses",
        {"input": "a", "instructions": "b"},
        "System role",
        id="responses instructions",
    ),
    pytest.param("/v1/messages", {"system": "a"}, "System role", id="messages system"),
    pytest.param(
        "/v1/messages/count_tokens", {"system": "a"}, "System role", id="count_tokens system"
    ),
    *(
        pytest.param(
            path, {field: [{"role": "user", "content": word}]}, "template", id=f"{path} {word}"
        )
        for path, field in (
            ("/v1/chat/completions", "messages"),
            ("/v1/responses", "input"),
            ("/v1/messages", "messages"),
        )
        for word in ("divide", "lose", "fall")
    ),
]


@pytest.mark.parametrize(("path", "fields", "words"), _REFUSED_BY_TEMPLATE)
def test_what_the_template_refuses_is_told(
    stern: httpx.Client, path: str, fields: dict[str, object], words: str
) -> None:
    """A template's own words reach the client as a 400, also where it merely breaks."""
    dialect = "/v1/messages" if path.startswith("/v1/messages") else path
    body = valid_body(dialect, **{"model": "tiny-llama", **fields})
    answer = stern.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert words in str(error_of(dialect, answer.json())["message"])
    assert stern.post(dialect, json=valid_body(dialect, model="tiny-llama")).status_code == 200
