"""Answers go on where they stopped when the model is suspended and resumed, and nobody is to blame for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.cached_answers import Asked, ask, ask_streamed
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.scraping import scrape
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat

from machd.errors import EngineFaultError

_FLAGS: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": 16,
    "cache.prefix": False,  # what is reused of a prompt is not seen by the scripted engine
}
_TEXT = "one answer that goes on and on, while its model comes and goes " * 4
_QUESTIONS = (
    Asked(chat(f"say {_TEXT}")),
    Asked(chat("letters", max_tokens=200, temperature=1, seed=3)),
    Asked({"model": "fake", "prompt": "letters", "max_tokens": 150, "n": 3, "seed": 5}),
)


@pytest.fixture(name="daemon")
def _daemon() -> Iterator[SupervisedDaemon]:
    with capture_logs(), SupervisedDaemon(_FLAGS) as daemon:
        yield daemon


def _suspend(daemon: SupervisedDaemon) -> None:
    begun = daemon.engine.suspend()
    assert begun is not None
    begun.result(CEILING_S)
    assert daemon.processes[-1].poll() is not None


def test_answers_are_whole_when_their_model_is_suspended_again_and_again(
    daemon: SupervisedDaemon,
) -> None:
    """Streamed and not, they say what they say undisturbed; no process counts as one that failed."""
    expected = [ask(daemon.url, one) for one in _QUESTIONS]
    with ThreadPoolExecutor(2 * len(_QUESTIONS)) as pool:
        plain = [pool.submit(ask, daemon.url, one) for one in _QUESTIONS]
        streamed = [pool.submit(ask_streamed, daemon.url, one) for one in _QUESTIONS[:2]]
        for _ in range(5):
            wait_until(lambda: scrape(daemon.url, "machd_active_loops") > 0, "answers are made")
            threading.Event().wait(0.1)
            _suspend(daemon)
            assert scrape(daemon.url, "machd_active_loops") == 0
            daemon.engine.resume().result(CEILING_S)
        said = [one.result(CEILING_S).said for one in plain]
        texts = [one.result(CEILING_S).texts for one in streamed]

    assert said == [one.said for one in expected]
    assert texts == [one.texts for one in expected[:2]]
    assert len(daemon.processes) == 6
    assert scrape(daemon.url, "machd_engine_restarts_total", reason="exit") == 0


def test_a_request_that_comes_meanwhile_waits(daemon: SupervisedDaemon) -> None:
    """It is answered once the model is resumed."""
    _suspend(daemon)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, daemon.url, _QUESTIONS[0])
        wait_until(lambda: scrape(daemon.url, "machd_generations_open") == 1, "it has come")
        daemon.engine.resume()

        assert answer.result(CEILING_S).texts == (_TEXT,)


def test_a_client_that_leaves_meanwhile_leaves_nothing(daemon: SupervisedDaemon) -> None:
    """Its sequence is not computed later."""
    _suspend(daemon)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{daemon.url}/v1/chat/completions", json=chat("say gone"), timeout=0.5)
    wait_until(lambda: scrape(daemon.url, "machd_generations_open") == 0, "it has left")
    daemon.engine.resume().result(CEILING_S)

    assert ask(daemon.url, Asked(chat("say here"))).texts == ("here",)


def test_a_suspended_daemon_stops_in_order() -> None:
    """At once, and its exit is none of a fault."""
    with capture_logs(), SupervisedDaemon(_FLAGS) as daemon:
        _suspend(daemon)

    assert daemon.error is None
    assert len(daemon.processes) == 1


def test_a_model_that_cannot_be_loaded_again_ends_its_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the tries that every process gets."""
    monkeypatch.setattr("machd.served.restarts._FIRST_BACKOFF_S", 0.01)
    with capture_logs(), SupervisedDaemon(_FLAGS) as daemon:
        daemon.refused_starts = 100
        _suspend(daemon)
        loading = daemon.engine.resume()

        assert isinstance(loading.exception(CEILING_S), EngineFaultError)
        assert isinstance(daemon.engine.finished.exception(CEILING_S), EngineFaultError)
