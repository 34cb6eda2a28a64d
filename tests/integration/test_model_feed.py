"""``GET /models/sse``: llama.cpp's page and Open WebUI learn from it which models are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import sse_events
from support.daemon.loopback_hub import LoopbackHub
from support.daemon.running_daemon import RunningDaemon
from support.daemon.several_models import several_models
from support.daemon.supervised_daemon import SupervisedDaemon

_SIZE = "size=35000000"
_FEED = "/models/sse"


@pytest.fixture(name="daemon")
def _daemon(tmp_path: Path) -> Iterator[SupervisedDaemon]:
    models = {"alpha": _SIZE, "org/beta": _SIZE, "broken": f"{_SIZE}&fails=1"}
    flags = {"streaming.keepalive_s": 0.2}
    with capture_logs(), several_models(tmp_path, models, flags=flags) as daemon:
        yield daemon


@pytest.fixture(name="http")
def _http(daemon: SupervisedDaemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client:
        yield client


def _events(stream: httpx.Response) -> Iterator[dict[str, Any]]:
    return (event for _name, event in sse_events(stream))


def _change(model: str, status: str, **data: int) -> dict[str, object]:
    return {"model": model, "event": "status_change", "data": {"status": status} | data}


def test_feed_tells_the_states_and_then_each_change(http: httpx.Client) -> None:
    """What each model does comes first; then a load and an unload, which the page waits for."""
    with http.stream("GET", _FEED) as stream:
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = _events(stream)
        states = [next(events) for _ in range(3)]
        assert states == [_change(one, "unloaded") for one in ("alpha", "org/beta", "broken")]
        http.post("/models/load", json={"model": "org/beta"}).raise_for_status()
        assert next(events) == _change("org/beta", "loading")
        assert next(events) == _change("org/beta", "loaded")
        http.post("/models/unload", json={"model": "org/beta"}).raise_for_status()
        assert next(events) == _change("org/beta", "unloaded", exit_code=0)


def test_feed_tells_a_load_for_each_alias(tmp_path: Path) -> None:
    """The page lists an alias as a model of its own, and waits for the event of that name."""
    config = tmp_path / "machd.toml"
    config.write_text(
        f'[models.alpha]\npath = "fake?{_SIZE}"\naliases = ["gpt-4o"]\n'
        f'[models.gamma]\npath = "fake?{_SIZE}"\n'
    )
    with (
        capture_logs(),
        SupervisedDaemon({}, config_path=config) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as http,
        http.stream("GET", _FEED) as stream,
    ):
        events = _events(stream)
        assert [next(events)["model"] for _ in range(3)] == ["alpha", "gamma", "gpt-4o"]
        http.post("/models/load", json={"model": "gpt-4o"}).raise_for_status()
        changes = [next(events) for _ in range(4)]
    assert changes == [
        _change(name, status) for status in ("loading", "loaded") for name in ("alpha", "gpt-4o")
    ]


def test_feed_tells_a_failed_load_by_its_exit_code(http: httpx.Client) -> None:
    """Once, as it fails: a feed that is opened later would otherwise end the page's next try before it begins."""
    with http.stream("GET", _FEED) as stream:
        events = _events(stream)
        for _ in range(3):
            next(events)
        http.post("/models/load", json={"model": "broken"}).raise_for_status()
        assert next(events) == _change("broken", "loading")
        assert next(events) == _change("broken", "unloaded", exit_code=1)
    with http.stream("GET", _FEED) as stream:
        events = _events(stream)
        assert [next(events) for _ in range(3)][2] == _change("broken", "unloaded")


def test_feed_is_kept_alive_and_ends_with_the_daemon(daemon: SupervisedDaemon) -> None:
    """Comments while nothing changes; then an end that is no broken connection, well within the grace of the stop."""
    with (
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as http,
        http.stream("GET", _FEED) as stream,
    ):
        lines = stream.iter_lines()
        assert any(line == ": keep-alive" for line in lines)
        daemon.stop()
        assert [line for line in lines if line.startswith("data:")] == []


def test_feed_ends_once_there_are_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page reads the list and opens the feed again, which has the new model."""
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(1000)}
    config = tmp_path / "machd.toml"
    config.write_text(
        "[model]\noffline = false\n[models]\nhub_cache = true\n"
        f'[models.alpha]\npath = "fake?{_SIZE}"\n[models.gamma]\npath = "fake?{_SIZE}"\n'
    )
    cache = tmp_path / "hf" / "hub"
    cache.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    with LoopbackHub({"org/name": files}) as hub, capture_logs():
        for name, value in hub.environ(tmp_path).items():
            monkeypatch.setenv(name, value)
        with (
            SupervisedDaemon({}, config_path=config) as daemon,
            httpx.Client(base_url=daemon.url, timeout=CEILING_S) as http,
        ):
            with http.stream("GET", _FEED) as stream:
                events = _events(stream)
                assert [next(events)["model"] for _ in range(2)] == ["alpha", "gamma"]
                http.post("/api/pull", json={"model": "org/name"}).raise_for_status()
                assert list(events) == [{"model": "*", "event": "models_reload"}]
            with http.stream("GET", _FEED) as stream:
                events = _events(stream)
                assert [next(events)["model"] for _ in range(3)] == ["alpha", "gamma", "org/name"]


def test_one_model_has_no_feed() -> None:
    """It stays loaded, and the path is no model of that name."""
    with capture_logs(), RunningDaemon() as daemon:
        answer = httpx.get(f"{daemon.url}{_FEED}", timeout=CEILING_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_a_page_that_leaves_is_watched_no_longer(
    daemon: SupervisedDaemon, http: httpx.Client
) -> None:
    """Its request is open no more."""

    def open_requests() -> float:
        text = http.get("/metrics").text
        return sum(
            float(line.split()[-1])
            for line in text.splitlines()
            if line.startswith("machd_http_requests_in_flight")
        )

    before = open_requests()
    with httpx.Client(base_url=daemon.url) as page, page.stream("GET", _FEED) as stream:
        next(_events(stream))
        assert open_requests() == before + 1
    wait_until(lambda: open_requests() == before, "the feed has ended")
