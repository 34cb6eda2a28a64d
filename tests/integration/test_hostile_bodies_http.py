"""Bodies that must be refused and must harm nothing, sent to a running daemon."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.clients.hostile_bodies import HOSTILE_CHAT_BODIES, HostileBody
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.dialogue import chat

_CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """A client of one daemon that has to outlive every body."""
    with RunningDaemon() as daemon, httpx.Client(base_url=daemon.url) as client:
        yield client


@pytest.mark.parametrize("hostile", HOSTILE_CHAT_BODIES, ids=lambda hostile: hostile[0])
def test_hostile_body_is_refused(http: httpx.Client, hostile: HostileBody) -> None:
    """A hostile body gets a short 4xx in the envelope, and the next good request is served."""
    _, body, allowed = hostile
    answer = http.post(_CHAT, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in allowed
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(answer.content) < 2000
    good = http.post(_CHAT, json=chat("hi", max_tokens=2))
    assert good.status_code == 200
    assert len(good.json()["choices"][0]["message"]["content"]) == 2


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show"])
def test_hostile_bodies_harm_no_endpoint_of_ollamas(http: httpx.Client, path: str) -> None:
    """Each gets a short 4xx in Ollama's envelope, or, where the field is not Ollama's, an answer."""
    statuses = set()
    for name, body, _ in HOSTILE_CHAT_BODIES:
        cut = body.replace(b'"model": "fake"', b'"options": {"num_predict": 1}, "model": "fake"', 1)
        answer = http.post(path, content=cut, headers={"Content-Type": "application/json"})
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404, 413), name
        if answer.status_code != 200:
            assert answer.json().keys() == {"error"}
            assert len(answer.content) < 2000
    assert statuses >= {200, 400}


def test_nothing_hostile_reached_the_engine(http: httpx.Client) -> None:
    """No generation of a refused body was ever opened: every counted request ended well."""
    url = str(http.base_url).rstrip("/")
    for reason in ("error", "abort", "reject"):
        assert scrape(url, "machd_requests_total", finish_reason=reason) == 0
    assert scrape(url, "machd_faults_total", scope="row") == 0
    assert scrape(url, "machd_faults_total", scope="engine") == 0
    assert http.get("/health/live").status_code == 200
