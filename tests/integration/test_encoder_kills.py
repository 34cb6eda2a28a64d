"""Vectors of texts are the same whatever becomes of the processes that compute them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from support.checkpoints.tiny_encoder import write_tiny_embedder
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.engine_processes import engine_of
from support.daemon.serve_process import ServeProcess

_ENDS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGKILL)
_REQUESTS = 96
_TEXTS = [f"text {'ab ' * (number % 6)}{number}" for number in range(40)]


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with ServeProcess(str(write_tiny_embedder(tmp_path_factory.mktemp("tiny")))) as server:
        yield server


def _vectors(server: ServeProcess, texts: list[str]) -> np.ndarray:
    answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": texts}, timeout=CEILING_S)
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


def test_every_request_is_answered_as_if_no_process_had_ended(server: ServeProcess) -> None:
    """Requests of several texts from 16 clients, before, during and after three ends of the engine process."""
    expected = {text: _vectors(server, [text])[0] for text in _TEXTS}
    asked = [
        [_TEXTS[(7 * number + 3 * place) % 40] for place in range(9)] for number in range(_REQUESTS)
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(_vectors, server, texts) for texts in asked]
        for number, end in enumerate(_ENDS, start=1):
            wanted = number * _REQUESTS // (len(_ENDS) + 1)
            wait_until(
                lambda: sum(one.done() for one in answers) >= wanted,  # noqa: B023 - it is waited for here
                "some requests are answered",
            )
            engine = engine_of(server.process.pid)
            engine.send_signal(end)
            engine.wait(CEILING_S)
        for texts, answer in zip(asked, answers, strict=True):
            np.testing.assert_allclose(
                answer.result(), [expected[text] for text in texts], atol=1e-5
            )
    restarted = [one for one in server.events if one["event"] == "engine.restarted"]
    ended = [one for one in server.events if one["event"] == "engine.process_ended"]
    assert len(restarted) == len(_ENDS)
    assert (
        ended[0]["status"] == _ENDS[0].name
    )  # the others come within a second, and are counted alone


def test_the_front_answers_health_while_its_encoder_is_loaded_again(server: ServeProcess) -> None:
    """A request that comes while no process serves waits for one; the daemon is alive meanwhile."""
    engine = engine_of(server.process.pid)
    engine.kill()
    engine.wait(CEILING_S)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_vectors, server, _TEXTS[:2])
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        assert answer.result().shape == (2, 16)
