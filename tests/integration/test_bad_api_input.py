"""Mistakes that only show deep inside a request: told in the right dialect, to its sender alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest
from support.clients.bad_requests import (
    BAD_REQUESTS,
    HEAVY_REQUESTS,
    PATHS,
    BadRequest,
    error_of,
    valid_body,
)
from support.clocks.held_call import HeldCall
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode

from machd.engine.grammar.grammar import LlguidanceCompiler
from machd.engine.protocol.engine import Engine

_BATCHED: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": 4,
    "continuous_batching.window_ms": 0,
}
_JSON = {"Content-Type": "application/json"}


@pytest.fixture(name="url", scope="module")
def _url() -> Iterator[str]:
    """A daemon with a scripted model."""
    with RunningDaemon() as daemon:
        yield daemon.url


@pytest.fixture(name="http", scope="module")
def _http(url: str) -> Iterator[httpx.Client]:
    """A client of that daemon."""
    with httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("bad", BAD_REQUESTS, ids=str)
def test_bad_request_is_a_short_400(http: httpx.Client, bad: BadRequest) -> None:
    """A mistake is a 400 in the dialect's own envelope, whose message is short, and whole in itself."""
    answer = _post(http, bad)
    assert answer.status_code == 400, answer.text
    error = error_of(bad.path, answer.json())
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(answer.content) < 2000


@pytest.mark.parametrize("heavy", HEAVY_REQUESTS, ids=str)
def test_heavy_request_is_answered_or_refused(http: httpx.Client, heavy: BadRequest) -> None:
    """A request within the bounds that is made to be slow is a 200 or a 400, and no failure of ours."""
    answer = _post(http, heavy)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error_of(heavy.path, answer.json())


@pytest.mark.parametrize("path", PATHS)
def test_bad_request_for_a_stream_is_a_400(http: httpx.Client, path: str) -> None:
    """A mistake is found before the stream begins, so its status tells."""
    bad = next(one for one in BAD_REQUESTS if one.path == path)
    body = bad.body[:-1] + b', "stream": true}'
    answer = http.post(path, content=body, headers=_JSON)
    assert answer.status_code == 400
    assert answer.headers["Content-Type"].startswith("application/json")
    error_of(path, answer.json())


@pytest.mark.parametrize("path", PATHS)
def test_schema_that_is_being_compiled_holds_neither_health_nor_streams(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the compiler has a bad schema, health is answered and a running stream gets tokens."""
    bad = next(one for one in BAD_REQUESTS if one.path == path and "a pattern that" in one.name)
    held = HeldCall(LlguidanceCompiler.compile)
    monkeypatch.setattr(LlguidanceCompiler, "compile", held.as_method())
    with _streaming() as (client, stream), ThreadPoolExecutor(1) as pool, held:
        stream.read()
        answer = pool.submit(_post, client, bad)
        held.wait_until_reached()
        for _ in range(20):
            stream.read()
            assert client.get("/health").status_code == 200
        assert not answer.done()
        held.may_go.set()
        assert answer.result().status_code == 400


def test_storm_of_bad_requests_leaves_no_trace() -> None:
    """Two senders send all of them beside a stream: it goes on, no fault is counted, all dialects serve."""
    storm = (BAD_REQUESTS[::2], BAD_REQUESTS[1::2])
    with _streaming() as (client, stream):
        stream.read()

        def send(requests: tuple[BadRequest, ...]) -> set[int]:
            return {_post(client, one).status_code for one in requests}

        with ThreadPoolExecutor(len(storm)) as pool:
            statuses = list(pool.map(send, storm))
        assert statuses == [{400}] * len(storm)
        stream.read()
        assert scrape(str(client.base_url).rstrip("/"), "machd_faults_total") == 0
        stream.gate.open()
        for path in PATHS:
            assert client.post(path, json=valid_body(path)).status_code == 200


@dataclass(frozen=True)
class _Stream:
    """A completion that is read one token at a time."""

    gate: StepGate
    lines: Iterator[str]

    def read(self) -> None:
        """Let the engine compute a token, and wait until the client has it."""
        self.gate.wait_until_held()
        self.gate.let()
        assert any(line.startswith("data: {") for line in self.lines), "the stream has ended"


@contextmanager
def _streaming() -> Iterator[tuple[httpx.Client, _Stream]]:
    """A client of a daemon whose other client reads a stream."""
    gate = StepGate(at_decode)
    engine = FakeEngine(before_step=gate, context_tokens=100_000)
    body = valid_body("/v1/completions", stream=True, max_tokens=90_000, ignore_eos=True)
    with (
        RunningDaemon(lambda: engine, _BATCHED) as daemon,
        gate,
        httpx.Client(base_url=daemon.url) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        yield client, _Stream(gate, stream.iter_lines())


def _post(http: httpx.Client, bad: BadRequest) -> httpx.Response:
    return http.post(bad.path, content=bad.body, headers=_JSON)


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
    from support.engines.tiny_models import TinyKind, tiny_model  # noqa: PLC0415

    from machd.engine.assembly import make_engine  # noqa: PLC0415 - mlx belongs to the engine thread
    from machd.engine.tokenizer.tokenizer import MlxTokenizer  # noqa: PLC0415 - the same

    model = tiny_model(TinyKind.STANDARD)
    assert isinstance(model.tokenizer, MlxTokenizer)
    model.tokenizer.wrapped._tokenizer.chat_template = _STERN
    return make_engine(model)


@pytest.fixture(name="stern", scope="module")
def _stern() -> Iterator[httpx.Client]:
    """A client of a daemon with that model."""
    with (
        RunningDaemon(_stern_engine) as daemon,
        httpx.Client(base_url=daemon.url) as client,
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
    pytest.param("/v1/responses", {"input": _TWO_QUESTIONS}, "alternate", id="responses order"),
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
