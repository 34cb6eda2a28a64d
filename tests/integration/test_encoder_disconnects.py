"""Clients of an encoder that leave: what nobody waits for any more is not computed, and no other answer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.scraping import scrape
from support.daemon.supervised_daemon import SupervisedDaemon

_MANY = [[2, number] for number in range(100, 400)]


@pytest.fixture(name="daemon")
def _daemon(tmp_path: Path) -> Iterator[SupervisedDaemon]:
    """A daemon whose encoder waits at its first pass for the file ``go``."""
    child = ("support.daemon.encoder_child", str(tmp_path))
    with capture_logs(), SupervisedDaemon(child=child) as running:
        yield running


def _send(daemon: SupervisedDaemon, inputs: list[list[int]]) -> RawClient:
    client = RawClient(daemon.url)
    client.post_json("/v1/embeddings", {"input": inputs})
    return client


def _embed(daemon: SupervisedDaemon, inputs: list[list[int]]) -> list[list[float]]:
    answer = httpx.post(f"{daemon.url}/v1/embeddings", json={"input": inputs}, timeout=CEILING_S)
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


def _wait_until_open(daemon: SupervisedDaemon, count: int) -> None:
    wait_until(
        lambda: scrape(daemon.url, "machd_generations_open") == count, f"{count} requests are open"
    )


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("leave", [RawClient.reset, RawClient.close], ids=["reset", "close"])
def test_texts_of_clients_that_have_left_are_not_computed(
    daemon: SupervisedDaemon, tmp_path: Path, leave: Callable[[RawClient], None]
) -> None:
    """One leaves while its text is computed, one while its texts wait, of which another client wants one as well."""
    with ThreadPoolExecutor(1) as pool:
        computed = _send(daemon, [[1]])
        wait_until((tmp_path / "begun").exists, "its text is being computed")
        waiting = _send(daemon, _MANY)
        _wait_until_open(daemon, 2)
        staying = pool.submit(_embed, daemon, [[3], _MANY[7], [3, 3]])
        _wait_until_open(daemon, 3)
        leave(computed)
        leave(waiting)
        _wait_until_open(daemon, 1)
        wait_until(lambda: len(_lines(tmp_path / "drops")) == 2, "the engine process knows")
        (tmp_path / "go").touch()
        assert staying.result(CEILING_S) == [[3.0, 1.0], [2.0, 2.0], [3.0, 2.0]]
    assert sorted(_lines(tmp_path / "drops")) == ["1", str(len(_MANY))]
    first, *others = _lines(tmp_path / "passes")
    assert first == "(1,)"
    assert sorted(others) == ["(2, 107)", "(3, 3)", "(3,)"]
    assert scrape(daemon.url, "machd_aborts_total", reason="client_disconnected") == 2
    assert _embed(daemon, [[1]]) == [[1.0, 1.0]]
