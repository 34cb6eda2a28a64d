"""A running daemon fetches models for its operators, from a hub on loopback."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from click.testing import CliRunner
from huggingface_hub import constants
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.loopback_hub import COMMIT, LoopbackHub

from machd.cli.model import model
from machd.errors import ConflictError
from machd.served.model_files import discover

_MODEL = "org/name"
_WEIGHTS = "model.safetensors"
_SIZE_BYTES = 2_000_000
_FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    _WEIGHTS: random.Random(1).randbytes(_SIZE_BYTES),
}
_PULL = "/admin/models/pull"
_ONLINE: dict[str, object] = {"model.offline": False, "models.hub_cache": True}


@pytest.fixture(name="hub")
def _hub() -> Iterator[LoopbackHub]:
    with LoopbackHub({_MODEL: _FILES, "org/other": _FILES | {_WEIGHTS: b"small"}}) as hub:
        yield hub


@pytest.fixture(name="cache")
def _cache(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, of this process and of those that it starts."""
    for name, value in hub.environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    cache = tmp_path / "hf" / "hub"
    cache.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


@pytest.fixture(name="daemon")
def _daemon(cache: Path, tmp_path: Path) -> Iterator[AdminDaemon]:
    assert cache.is_dir()
    with AdminDaemon(tmp_path, flags=_ONLINE) as daemon:
        yield daemon


def _lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


@contextmanager
def _slow(daemon: AdminDaemon, hub: LoopbackHub, model: str = _MODEL) -> Iterator[Iterator[str]]:
    """A download under way, at a crawl, of which some has come; gives the lines that follow."""
    hub.bytes_per_s = 200_000
    with daemon.admin.stream("POST", _PULL, json={"model": model}, timeout=CEILING_S) as answer:
        lines = answer.iter_lines()
        for line in lines:
            told = json.loads(line)
            if told["status"] == "downloading" and told["completed_bytes"] > 0:
                break
        yield lines


def test_an_operator_pulls_a_model(daemon: AdminDaemon, cache: Path) -> None:
    """The plan, the bytes and the end come as lines of JSON, and the model is in the hub's cache."""
    lines = _lines(daemon.admin.post(_PULL, json={"model": _MODEL}, timeout=CEILING_S))

    assert lines[0]["status"] == "planned"
    assert lines[0]["total_bytes"] >= _SIZE_BYTES
    assert lines[-1].keys() >= {"note"}  # a daemon of one model goes on serving that one
    assert {name: value for name, value in lines[-1].items() if name != "note"} == {
        "status": "success",
        "model": _MODEL,
        "revision": COMMIT,
        "path": str(cache / "models--org--name" / "snapshots" / COMMIT),
        "total_bytes": lines[0]["total_bytes"],
    }
    assert [one.name for one in discover(cache)] == [_MODEL]


def test_a_failed_pull_ends_with_its_reason(daemon: AdminDaemon, hub: LoopbackHub) -> None:
    """A hub that knows no such model, and a wrong hash, are the last line, with the code of the error."""
    (line,) = _lines(daemon.admin.post(_PULL, json={"model": "org/none"}, timeout=CEILING_S))
    assert (line["status"], line["code"]) == ("error", "model_missing")
    hub.wrong.add(_WEIGHTS)
    last = _lines(daemon.admin.post(_PULL, json={"model": _MODEL}, timeout=CEILING_S))[-1]
    assert (last["status"], last["code"]) == ("error", "model_download_failed")
    assert "it was deleted" in last["message"]


def test_leaving_stops_the_download(daemon: AdminDaemon, hub: LoopbackHub) -> None:
    """Then another one may begin; what has come stays, and the next pull asks for the rest."""
    with _slow(daemon, hub):
        pass

    def pull(model: str) -> httpx.Response:
        return daemon.admin.post(_PULL, json={"model": model}, timeout=CEILING_S)

    wait_until(lambda: pull("org/other").status_code == 200, "the first is stopped")
    hub.bytes_per_s = None
    hub.transfers.clear()
    assert _lines(pull(_MODEL))[-1]["status"] == "success"
    (start,) = (one.start for one in hub.transfers if one.file == _WEIGHTS)
    assert start > 0


def test_downloads_go_one_at_a_time(daemon: AdminDaemon, hub: LoopbackHub) -> None:
    """Another model is refused, the same one is followed by both, and DELETE stops it for both."""
    with _slow(daemon, hub):
        refused = daemon.admin.post(_PULL, json={"model": "org/other"})
        assert refused.status_code == 409
        assert "org/name is being fetched" in refused.json()["error"]["message"]
        with daemon.admin.stream(
            "POST", _PULL, json={"model": _MODEL}, timeout=CEILING_S
        ) as second:
            lines = second.iter_lines()
            assert json.loads(next(lines))["status"] == "planned"
            assert daemon.admin.delete(_PULL).json() == {"model": _MODEL}
            last = [json.loads(line) for line in lines][-1]
        assert (last["status"], last["code"]) == ("error", "operator_abort")
    assert daemon.admin.delete(_PULL).status_code == 409


def test_a_daemon_of_one_model_lists_no_download(daemon: AdminDaemon, hub: LoopbackHub) -> None:
    """It would not serve what comes; its operator sees it all the same."""
    before = daemon.http.get("/v1/models").json()
    with _slow(daemon, hub):
        assert daemon.http.get("/v1/models").json() == before
        download = daemon.admin.get("/admin/models").json()["download"]
    assert download["model"] == _MODEL
    assert 0 < download["completed_bytes"] < download["total_bytes"]


@pytest.mark.parametrize(
    "body",
    [
        {"model": "--help/x"},
        {"model": "name"},
        {"model": "org/name", "revision": "--yes"},
        {"model": "org/name", "revision": "a/../b"},
        {"model": "org/name", "include": ["\n"]},
        {"model": "org/name", "directory": "/etc"},
    ],
)
def test_what_is_no_model_of_the_hub_is_refused(daemon: AdminDaemon, body: dict[str, Any]) -> None:
    """Nothing that a command line or a path could be made of gets to the download."""
    assert daemon.admin.post(_PULL, json=body).status_code == 400


def test_an_offline_daemon_fetches_nothing(cache: Path, hub: LoopbackHub, tmp_path: Path) -> None:
    """With model.offline, the default, both doors say what to set."""
    with AdminDaemon(tmp_path, flags={"models.hub_cache": True}) as daemon:
        answers = [
            daemon.admin.post(_PULL, json={"model": _MODEL}),
            daemon.http.post("/api/pull", json={"model": _MODEL}),
        ]
    assert [one.status_code for one in answers] == [409, 409]
    assert all("model.offline is true" in one.text for one in answers)
    assert not hub.transfers
    assert cache.is_dir()


def test_ollamas_client_pulls(daemon: AdminDaemon, cache: Path) -> None:
    """Its statuses are those that Ollama's clients show: manifest, bytes by digest, success."""
    with ollama.Client(host=daemon.daemon.url) as client:
        statuses = list(client.pull(f"hf.co/{_MODEL}:latest", stream=True))

        assert statuses[0].status == "pulling manifest"
        assert statuses[-1].status == "success"
        done = [one for one in statuses if one.digest is not None and one.total == _SIZE_BYTES]
        assert done[-1].completed == _SIZE_BYTES
        assert str(done[-1].digest).startswith("sha256:")
        assert client.pull(_MODEL).status == "success"
        whole = {"model": _MODEL, "stream": False}
        answer = httpx.post(f"{daemon.daemon.url}/api/pull", json=whole, timeout=CEILING_S).json()
        assert answer.keys() == {"status", "note"}
        assert answer["note"].startswith("it is here, and not served yet")
        assert discover(cache)
        with pytest.raises(ollama.ResponseError, match="the hub has no model org/none"):
            list(client.pull("org/none", stream=True))
        with pytest.raises(ollama.ResponseError, match="the hub has no model org/none"):
            client.pull("org/none")
        with pytest.raises(ollama.ResponseError, match="ORG/NAME"):
            client.pull("llama3.2")


def test_a_client_with_an_api_key_is_no_operator(
    cache: Path, hub: LoopbackHub, tmp_path: Path
) -> None:
    """Where keys are required, a key for answers opens no downloads; the admin token does, before any model was found."""
    keys = tmp_path / "keys"
    keys.write_text("alice:0123456789abcdef-alice\n")
    keys.chmod(0o600)
    with AdminDaemon(tmp_path, flags=_ONLINE | {"auth.api_keys_file": str(keys)}) as daemon:
        headers = {"Authorization": "Bearer 0123456789abcdef-alice"}
        answer = daemon.http.post("/api/pull", json={"model": _MODEL}, headers=headers)
        assert answer.status_code == 403
        assert not hub.transfers
        headers = {"Authorization": f"Bearer {daemon.token}"}
        answer = daemon.http.post(
            "/api/pull", json={"model": _MODEL}, headers=headers, timeout=CEILING_S
        )
        assert _lines(answer)[-1] == {"status": "success"}
    assert cache.is_dir()


def test_a_daemon_that_stops_ends_its_download(
    cache: Path, hub: LoopbackHub, tmp_path: Path
) -> None:
    """No process stays behind, and what has come is kept."""
    with AdminDaemon(tmp_path, flags=_ONLINE) as daemon, _slow(daemon, hub) as lines:
        daemon.daemon.stop()
        last = [json.loads(line) for line in lines][-1]
        (partial,) = cache.glob("models--*/blobs/*.incomplete")
        assert 0 < partial.stat().st_size < _SIZE_BYTES
    assert last["status"] == "error"


def test_remove_refuses_what_a_daemon_serves(cache: Path, tmp_path: Path) -> None:
    """The command asks the daemon for its settings, and deletes nothing that they name."""
    blobs = cache / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "part").write_bytes(b"weights")
    with AdminDaemon(tmp_path, flags={"model.path": _MODEL}) as daemon:
        target = ("--address", daemon.admin_url, "--token-file", str(daemon.token_file))
        refused = CliRunner().invoke(model, ["remove", _MODEL, "--yes", *target])
        assert isinstance(refused.exception, ConflictError), refused.output
        assert blobs.exists()
    removed = CliRunner().invoke(model, ["remove", _MODEL, "--yes", *target])
    assert removed.exit_code == 0, removed.output
    assert not blobs.exists()


def test_remove_refuses_a_model_that_a_daemon_has_found(cache: Path, tmp_path: Path) -> None:
    """A model of models.directory, which no setting names, is known from the list of those that are served."""
    found = tmp_path / "models" / "mine"
    found.mkdir(parents=True)
    for name in ("config.json", _WEIGHTS):
        (found / name).write_bytes(_FILES[name])
    config = tmp_path / "machd.toml"
    config.write_text(
        f'[models]\ndirectory = "{found.parent}"\n[models.alpha]\npath = "fake?size=1000"\n'
    )
    remove = ["remove", "mine", "--yes", "--config", str(config)]
    with AdminDaemon(tmp_path, config_path=config) as daemon:
        target = ("--address", daemon.admin_url, "--token-file", str(daemon.token_file))
        refused = CliRunner().invoke(model, [*remove, *target])
        assert isinstance(refused.exception, ConflictError), refused.output
        assert "serves mine" in refused.exception.message
        wrong = tmp_path / "wrong-token"
        wrong.write_text("0123456789abcdef0123456789abcdef\n")
        wrong.chmod(0o600)
        unknown = CliRunner().invoke(
            model, [*remove, "--address", daemon.admin_url, "--token-file", str(wrong)]
        )
        assert isinstance(unknown.exception, ConflictError), unknown.output
        assert "does not know this token" in unknown.exception.message
        assert found.exists()
    assert CliRunner().invoke(model, [*remove, *target]).exit_code == 0
    assert not found.exists()
    assert cache.is_dir()
