"""A stream whose model is not loaded begins at once, does not look dead, and holds the answer or the error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.cached_answers import Asked, ask
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.scraping import scrape
from support.daemon.several_models import several_models
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat

from machd.http.large_bodies import BodyLease
from machd.served.lease import Lease
from machd.served.named_model import NamedModel

_LOAD_S = 1.0
_KEEPALIVE_S = 0.2
_SOON_S = 0.8 * _LOAD_S

Make = Callable[..., SupervisedDaemon]


@pytest.fixture(name="make")
def _make(tmp_path: Path) -> Iterator[Make]:
    """Makes a daemon with a model that is slow to load, and one that never fits."""

    def make(**section: object) -> SupervisedDaemon:
        models = {
            "quick": "size=35000000",
            "slow": f"size=35000000&load_s={_LOAD_S}",
            "huge": "size=500000000",
        }
        flags = {"streaming.keepalive_s": _KEEPALIVE_S} | {
            key.replace("__", "."): section.pop(key) for key in list(section) if "__" in key
        }
        return several_models(tmp_path, models, flags=flags, section=section)

    with capture_logs():
        yield make


_DIALECTS = ("chat", "completions", "responses", "anthropic", "ollama chat", "ollama generate")


@pytest.fixture(name="url", scope="module")
def _url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon with a slow model and a broken one for each dialect."""
    models = {"quick": "size=1"}
    for one in _DIALECTS:
        models[f"slow {one}"] = f"size=1&load_s={_LOAD_S}"
        models[f"broken {one}"] = f"size=1&load_s={_LOAD_S}&fails=1"
    flags = {"streaming.keepalive_s": _KEEPALIVE_S}
    folder = tmp_path_factory.mktemp("models")
    with capture_logs(), several_models(folder, models, flags=flags) as daemon:
        yield daemon.url


@dataclass(frozen=True)
class _Streamed:
    """A stream as it came.

    Attributes:
        begun_s: Seconds to its headers.
    """

    status: int
    headers: httpx.Headers
    body: bytes
    begun_s: float


def _stream(url: str, path: str, body: dict[str, object], **headers: str) -> _Streamed:
    start_s = time.monotonic()
    with httpx.stream(
        "POST", url + path, json=body, headers=headers, timeout=CEILING_S
    ) as response:
        begun_s = time.monotonic() - start_s
        return _Streamed(response.status_code, response.headers, response.read(), begun_s)


def _asked(dialect: str = "chat", model: str = "slow") -> tuple[str, dict[str, object]]:
    """The path and the body of a stream that says ``hello``."""
    messages = [{"role": "user", "content": "say hello"}]
    bodies: dict[str, tuple[str, dict[str, object]]] = {
        "chat": ("/v1/chat/completions", {"messages": messages, "stream": True}),
        "completions": ("/v1/completions", {"prompt": "say hello", "stream": True}),
        "responses": ("/v1/responses", {"input": "say hello", "stream": True}),
        "anthropic": ("/v1/messages", {"messages": messages, "max_tokens": 50, "stream": True}),
        "ollama chat": ("/api/chat", {"messages": messages}),
        "ollama generate": ("/api/generate", {"prompt": "say hello", "raw": True}),
    }
    path, body = bodies[dialect]
    return path, {"model": model, **body}


def _events(body: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events, or its lines."""
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n")]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def _text(events: list[dict[str, Any]]) -> str:
    return "".join(
        str(
            one.get("response")
            or one.get("message", {}).get("content")
            or (one["delta"] if isinstance(one.get("delta"), str) else "")
            or (one["delta"].get("text", "") if isinstance(one.get("delta"), dict) else "")
            or "".join(
                choice.get("text") or choice.get("delta", {}).get("content") or ""
                for choice in one.get("choices", [])
            )
        )
        for one in events
        if one.get("type") not in {"message_start", "response.completed"}
        and not isinstance(one.get("response"), dict)
    )


@pytest.mark.parametrize("dialect", _DIALECTS)
def test_a_cold_stream_begins_at_once_and_holds_the_answer(url: str, dialect: str) -> None:
    """Its headers come before the model is loaded, keep-alive frames follow, and then the answer as usual."""
    path, body = _asked(dialect, f"slow {dialect}")
    cold = _stream(url, path, body)
    warm = _stream(url, path, body)

    assert (cold.status, cold.begun_s < _SOON_S) == (200, True)
    assert cold.headers["x-model-state"] in {"loading", "unloaded"}
    assert cold.headers["x-request-id"]
    assert cold.headers["content-type"] == warm.headers["content-type"]
    assert "x-model-state" not in warm.headers
    assert _text(_events(cold.body)) == _text(_events(warm.body)) == "hello"
    begun, *_ = cold.body.split(b"\n")
    if dialect.startswith("ollama"):
        assert sum(not line for line in cold.body.split(b"\n")) == 1, "no line is empty"
        lines = _events(cold.body)
        assert [one["done"] for one in lines] == [False] * (len(lines) - 1) + [True]
        assert len(lines) >= len(_events(warm.body)) + 3
        assert {one["model"] for one in lines} == {f"slow {dialect}"}
    elif dialect == "anthropic":
        assert cold.body.count(b"event: ping") >= warm.body.count(b"event: ping") + 3
        assert begun == b"event: ping"
    else:
        comments = [one for one in cold.body.split(b"\n\n") if one.startswith(b": ")]
        told = f": loading slow {dialect}".encode()
        assert comments[0] == told
        assert {told + b", 25 %", told + b", 75 %"} <= set(comments), comments


@pytest.mark.parametrize("dialect", _DIALECTS)
def test_a_cold_stream_whose_model_cannot_be_loaded_ends_with_the_dialects_error(
    url: str, dialect: str
) -> None:
    """The error looks like one in the middle of a stream, and is counted as a refusal."""
    path, body = _asked(dialect, f"broken {dialect}")
    before = scrape(url, "machd_rejections_total", reason="model_not_loaded")
    cold = _stream(url, path, body)
    assert scrape(url, "machd_rejections_total", reason="model_not_loaded") == before + 1
    again = _stream(url, path, body)

    assert (cold.status, cold.begun_s < _SOON_S) == (200, True)
    last = _events(cold.body)[-1]
    message = f"the model 'broken {dialect}' could not be loaded"
    match dialect:
        case "responses":
            kinds = [one["type"] for one in _events(cold.body)]
            assert kinds == ["response.created", "response.in_progress", "response.failed"]
            assert last["response"]["status"] == "failed"
            assert message in last["response"]["error"]["message"]
        case "anthropic":
            assert cold.body.split(b"\n\n")[-2].startswith(b"event: error\n")
            assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
            assert last["request_id"] == cold.headers["request-id"]
        case "chat" | "completions":
            assert cold.body.endswith(b"data: [DONE]\n\n")
            assert last["error"]["code"] == "model_not_loaded"
        case _:
            assert message in last["error"]
    # It has failed just now, so that nothing is waited for.
    assert again.status == 503
    assert again.headers["retry-after"]


def test_what_is_wrong_by_itself_gets_its_status_and_loads_nothing(make: Make) -> None:
    """A body that is none, a model that is not served, and fields that contradict each other."""
    with make() as daemon:
        url = f"{daemon.url}/v1/chat/completions"
        body = chat("say no", stream=True) | {"model": "slow"}
        statuses = [
            httpx.post(url, json=one).status_code
            for one in (
                body | {"model": "nobody"},
                body | {"messages": 3},
                body | {"max_tokens": 5, "max_completion_tokens": 6},
            )
        ]
        raw = httpx.post(url, content=b"{", headers={"content-type": "application/json"})

    assert [*statuses, raw.status_code] == [404, 400, 400, 400]
    assert not daemon.processes


def test_a_model_that_never_fits_is_refused_in_the_stream(make: Make) -> None:
    """Its process says how much it needs, and the stream has begun by then."""
    path, body = _asked("chat", "huge")
    with make() as daemon:
        cold = _stream(daemon.url, path, body)

    assert cold.status == 200
    assert "models.memory_gb is 0.10" in _events(cold.body)[-1]["error"]["message"]


def test_without_autoload_a_stream_gets_its_status(make: Make) -> None:
    """Nothing is waited for."""
    path, body = _asked()
    with make(autoload=False) as daemon:
        refused = _stream(daemon.url, path, body)

    assert refused.status == 503
    assert json.loads(refused.body)["error"]["code"] == "model_not_loaded"


def test_a_load_that_takes_too_long_is_an_error_in_the_stream_and_503_without_one(
    make: Make,
) -> None:
    """Both are bounded by ``limits.queue_timeout_s``; what is not streamed says when to try again."""
    path, body = _asked()
    with make(limits__queue_timeout_s=0.3) as daemon, ThreadPoolExecutor(1) as pool:
        streamed = pool.submit(_stream, daemon.url, path, body)
        whole = httpx.post(daemon.url + path, json=body | {"stream": False}, timeout=CEILING_S)

        assert whole.status_code == 503
        assert int(whole.headers["retry-after"]) >= 1
        assert whole.json()["error"]["code"] == "not_ready"
        error = _events(streamed.result(CEILING_S).body)[-1]["error"]
        assert error["code"] == "not_ready"


def test_what_the_model_shows_to_be_wrong_is_an_error_in_the_stream(make: Make) -> None:
    """A schema that no grammar can hold is found once the model is there."""
    path, body = _asked()
    wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
    with make() as daemon:
        cold = _stream(daemon.url, path, body | {"response_format": wrong})
        warm = _stream(daemon.url, path, body | {"response_format": wrong})

    assert (cold.status, warm.status) == (200, 400)
    assert _events(cold.body)[-1] == json.loads(warm.body)


def test_a_client_that_leaves_during_the_load_holds_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease ends before the model is loaded."""
    path, body = _asked()
    held: list[NamedModel] = []
    hold = NamedModel.hold

    def hold_noted(model: NamedModel) -> Lease:
        held.append(model)
        return hold(model)

    monkeypatch.setattr(NamedModel, "hold", hold_noted)
    with make() as daemon:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(daemon.url + path, json=body, timeout=0.15)
        (model,) = held
        wait_until(lambda: model.leases == 0, "its lease has ended")
        assert not model.is_ready
        assert ask(daemon.url, Asked(chat("say here") | {"model": "slow"})).texts == ("here",)


def test_a_large_body_is_counted_until_its_model_is_loaded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held in memory although the stream has begun."""
    released_s: list[float] = []
    release = BodyLease.release

    def release_noted(lease: BodyLease) -> None:
        released_s.append(time.monotonic())
        release(lease)

    path, body = _asked()
    with make() as daemon:
        monkeypatch.setattr(BodyLease, "release", release_noted)
        start_s = time.monotonic()
        streamed = _stream(daemon.url, path, body)

    assert streamed.begun_s < _SOON_S
    assert released_s[0] - start_s >= _LOAD_S


def test_a_request_without_text_that_loads_a_model_is_answered_in_one_piece(make: Make) -> None:
    """Ollama's clients read one JSON object, whatever ``stream`` is by default."""
    with make() as daemon:
        answer = httpx.post(f"{daemon.url}/api/generate", json={"model": "slow"}, timeout=CEILING_S)

    assert answer.json()["done_reason"] == "load"
    assert "x-model-state" not in answer.headers


_LONG = "an answer that goes on and on " * 60
"""Longer than an engine process takes to start."""


def test_the_stream_of_a_suspended_model_gets_keep_alives(make: Make) -> None:
    """While another model has its turn they say that it waits; then it goes on."""
    body = chat(f"say {_LONG}", stream=True) | {"model": "quick"}
    lines: list[str] = []
    with (
        make(memory_gb=0.05, max_turn_s=0.5) as daemon,
        ThreadPoolExecutor(1) as pool,
        httpx.stream(
            "POST", f"{daemon.url}/v1/chat/completions", json=body, timeout=CEILING_S
        ) as response,
    ):
        short = pool.submit(ask, daemon.url, Asked(chat("say short") | {"model": "slow"}))
        for line in response.iter_lines():
            lines.append(line)
            if short.done() and line.startswith("data: "):
                break
        assert short.result(0).texts == ("short",)

    assert lines.count(": waiting") >= 2


def test_a_stream_that_waits_for_a_slot_begins_when_its_model_is_suspended(make: Make) -> None:
    """It has no headers until then, and holds its answer once it has its slot."""
    section: dict[str, object] = {"memory_gb": 0.05, "max_turn_s": 0.5}
    with (
        make(**section, continuous_batching__max_b=1) as daemon,
        ThreadPoolExecutor(1) as pool,
    ):
        url = f"{daemon.url}/v1/chat/completions"
        long = chat(f"say {_LONG}", stream=True) | {"model": "quick"}
        with httpx.stream("POST", url, json=long, timeout=CEILING_S):
            wait_until(lambda: scrape(daemon.url, "machd_active_loops") > 0, "it is answered")
            waiting = pool.submit(_stream, daemon.url, *_asked("anthropic", "quick"))
            wait_until(lambda: scrape(daemon.url, "machd_requests_waiting") > 0, "it waits")
            short = ask(daemon.url, Asked(chat("say short") | {"model": "slow"}))
        streamed = waiting.result(CEILING_S)

    assert short.texts == ("short",)
    assert streamed.headers["x-model-state"] in {"suspending", "unloaded", "loading"}
    assert streamed.body.startswith(b"event: ping\n")
    assert _text(_events(streamed.body)) == "hello"


def test_pages_of_an_allowed_origin_may_read_a_cold_stream(make: Make) -> None:
    """Its headers are those of every answer to them."""
    path, body = _asked()
    with make(http__allowed_origins=["http://page.example"]) as daemon:
        cold = _stream(daemon.url, path, body, origin="http://page.example")

    assert cold.headers["access-control-allow-origin"] == "http://page.example"
    assert "X-Model-State" in cold.headers["access-control-expose-headers"]
