"""Vectors of earlier texts over HTTP: the same bytes as computed, each model's own, and gone when they have to be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.checkpoints.tiny_encoder import write_tiny_classifier, write_tiny_embedder
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.engine_processes import engines_of
from support.daemon.operated_process import OperatedProcess, operated_process
from support.daemon.scraping import scrape
from support.daemon.serve_process import ServeProcess

_TEXTS = ["a", "some words here", "a", "b" * 20, "", "x y z"]
_DIFFERENT = 5
_CONFIG = """
[models.plain]
path = "{folder}/one"
[models.kept]
path = "{folder}/one"
cache.vectors_mb = {vectors_mb}
[models.other]
path = "{folder}/other"
cache.vectors_mb = 1
[models.cross]
path = "{folder}/cross"
cache.vectors_mb = 1
"""


@dataclass
class _Daemon:
    """A daemon of encoders, with its operator."""

    operated: OperatedProcess
    folder: Path

    @property
    def server(self) -> ServeProcess:
        """The process."""
        return self.operated.server

    @property
    def http(self) -> httpx.Client:
        """A client of its own."""
        return self.operated.http

    def embed(self, model: str, texts: list[str] = _TEXTS) -> Any:
        """Return an answer's vectors, in base64, and its usage."""
        body = {"model": model, "input": texts, "encoding_format": "base64"}
        answer = self.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return [one["embedding"] for one in answer.json()["data"]], answer.json()["usage"]

    def lookups(self, model: str, outcome: str) -> float:
        """Return a count of the texts that were looked up."""
        name = "machd_encoder_lookups_total"
        return scrape(self.server.url, name, model=model, outcome=outcome)

    def bytes_of(self, model: str) -> float:
        """Return what a model's vectors take."""
        return scrape(self.server.url, "machd_encoder_cache_bytes", model=model)


def _write_config(folder: Path, vectors_mb: int) -> Path:
    config = folder / "machd.toml"
    config.write_text(_CONFIG.format(folder=folder, vectors_mb=vectors_mb))
    return config


@pytest.fixture(name="daemon", scope="module")
def _daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Daemon]:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_embedder(folder / "one")
    write_tiny_embedder(folder / "other", seed=1)
    write_tiny_classifier(folder / "cross", ["relevant"])
    with operated_process(_write_config(folder, 1)) as operated:
        yield _Daemon(operated, folder)


@pytest.fixture(autouse=True)
def _empty(daemon: _Daemon) -> None:
    for model in ("kept", "other", "cross"):
        daemon.operated.command(f"/admin/cache/clear?model={model}")


def test_kept_vectors_are_those_that_were_computed(daemon: _Daemon) -> None:
    """Bit for bit and with the same usage; each different text is looked up once a request."""
    hits, misses = daemon.lookups("kept", "hit"), daemon.lookups("kept", "miss")
    computed = daemon.embed("kept")
    assert computed == daemon.embed("plain")
    assert daemon.lookups("kept", "miss") == misses + _DIFFERENT
    assert daemon.embed("kept") == computed
    assert daemon.lookups("kept", "miss") == misses + _DIFFERENT
    assert daemon.lookups("kept", "hit") == hits + _DIFFERENT


def test_kept_vectors_are_a_models_own(daemon: _Daemon) -> None:
    """Equal texts of another model have other vectors, whoever was asked first."""
    kept, other = daemon.embed("kept"), daemon.embed("other")
    assert kept[0] != other[0]
    assert daemon.embed("kept") == kept
    assert daemon.embed("other") == other


def test_nothing_is_kept_by_default(daemon: _Daemon) -> None:
    """Of a model whose settings say nothing."""
    daemon.embed("plain")
    assert daemon.bytes_of("plain") == 0


def test_kept_scores_are_those_that_were_computed(daemon: _Daemon) -> None:
    """Pairs are found by both texts and by where the second one begins."""
    body = {"model": "cross", "query": "a cat", "documents": ["a dog", "zzz", "", "a cat"]}
    turned = body | {"query": "zzz", "documents": ["a cat", "a dog"]}
    computed = [daemon.http.post("/v1/rerank", json=one).json() for one in (body, turned)]
    misses = daemon.lookups("cross", "miss")
    found = [daemon.http.post("/v1/rerank", json=one).json() for one in (body, turned)]
    assert [one["results"] for one in found] == [one["results"] for one in computed]
    assert [one["usage"] for one in found] == [one["usage"] for one in computed]
    assert daemon.lookups("cross", "miss") == misses


def test_vectors_go_with_the_process_that_computed_them(daemon: _Daemon) -> None:
    """An operator unloads the model, or its process dies: the next load may read other weights."""
    computed = daemon.embed("kept")
    assert daemon.bytes_of("kept") > 0
    daemon.operated.command("/admin/models/kept/unload")
    assert daemon.bytes_of("kept") == 0
    misses = daemon.lookups("kept", "miss")
    assert daemon.embed("kept") == computed
    assert daemon.lookups("kept", "miss") == misses + _DIFFERENT
    for one in ("plain", "other", "cross"):
        daemon.operated.command(f"/admin/models/{one}/unload")
    wait_until(lambda: len(engines_of(daemon.server.process.pid)) == 1, "one model is loaded")
    (engine,) = engines_of(daemon.server.process.pid)
    engine.kill()
    engine.wait(CEILING_S)
    daemon.server.wait_for("engine.restarted")
    assert daemon.embed("kept") == computed
    assert daemon.lookups("kept", "miss") == misses + 2 * _DIFFERENT


def test_the_bound_is_taken_on_while_the_daemon_runs(daemon: _Daemon) -> None:
    """Less memory evicts, and the model is not loaded again for it."""
    daemon.embed("kept")
    engines = engines_of(daemon.server.process.pid)
    _write_config(daemon.folder, 0)
    daemon.operated.command("/admin/reload")
    daemon.embed("kept", ["a"])
    assert daemon.bytes_of("kept") == 0
    _write_config(daemon.folder, 1)
    daemon.operated.command("/admin/reload")
    daemon.embed("kept", ["a"])
    assert daemon.bytes_of("kept") > 0
    assert engines_of(daemon.server.process.pid) == engines


def test_an_operator_sees_and_clears_what_is_kept(daemon: _Daemon) -> None:
    """With the prefix cache and the stored responses."""
    daemon.embed("kept")
    stats = daemon.http.get("/v1/cache/stats", params={"model": "kept"}).json()["vectors"]
    assert stats["entries"] == _DIFFERENT
    assert stats["bytes"] == daemon.bytes_of("kept")
    assert stats["limit_bytes"] == 1_000_000
    daemon.operated.command("/admin/cache/clear?model=kept")
    wait_until(lambda: daemon.bytes_of("kept") == 0, "they are forgotten")
