"""A model that a daemon has fetched is served under its name at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import constants
from structlog.testing import capture_logs
from support.clients.cached_answers import Asked, ask
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.forked_commands import run_machd
from support.daemon.loopback_hub import LoopbackHub
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat

_MODEL = "org/name"


_LARGE = "org/large"
_LARGE_BYTES = 4_000_000
_FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(1000)}


@pytest.fixture(name="hub")
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A hub with a small model and a large one, whose cache is empty."""
    large = _FILES | {"model.safetensors": bytes(_LARGE_BYTES)}
    cache = tmp_path / "hf" / "hub"
    cache.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    with (
        LoopbackHub({_MODEL: _FILES | {"small.Q4_0.gguf": b"GGUF"}, _LARGE: large}) as hub,
        capture_logs(),
    ):
        for name, value in hub.environ(tmp_path).items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture(name="daemon")
def _daemon(hub: LoopbackHub, tmp_path: Path) -> Iterator[SupervisedDaemon]:
    assert hub.bytes_per_s is None
    config = tmp_path / "machd.toml"
    config.write_text(
        "[model]\noffline = false\n[models]\nhub_cache = true\n"
        '[models.alpha]\npath = "fake?size=1000"\n[models.beta]\npath = "fake?size=1000"\n'
    )
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    flags = {"admin.listen": "127.0.0.1:0"}
    with SupervisedDaemon(flags, config_path=config, environ=environ) as daemon:
        yield daemon


def test_a_pulled_model_is_served_without_a_restart(daemon: SupervisedDaemon) -> None:
    """Before it has come its name is unknown; then a request loads it, beside the others."""
    asked = Asked(chat("say hello") | {"model": _MODEL})
    unknown = httpx.post(f"{daemon.url}/v1/chat/completions", json=asked.fields)
    assert unknown.status_code == 404
    answer = httpx.post(f"{daemon.url}/api/pull", json={"model": _MODEL}, timeout=CEILING_S)
    assert json.loads(answer.text.splitlines()[-1]) == {"status": "success"}
    assert ask(daemon.url, asked).texts == ("hello",)
    order = {"model": f"hf.co/{_MODEL}:Q4_0"}
    answer = httpx.post(f"{daemon.url}/api/pull", json=order, timeout=CEILING_S)
    assert json.loads(answer.text.splitlines()[-1]) == {"status": "success"}
    asked = Asked(chat("say hello") | {"model": f"{_MODEL}/small.Q4_0"})
    assert ask(daemon.url, asked).texts == ("hello",)


def test_a_model_is_listed_while_it_is_fetched(
    daemon: SupervisedDaemon, hub: LoopbackHub, tmp_path: Path
) -> None:
    """As ``downloading``, with its bytes, for clients and operators; when it has stopped it is gone."""

    def listed() -> dict[str, dict[str, Any]]:
        return {one["id"]: one for one in httpx.get(f"{daemon.url}/models").json()["data"]}

    hub.bytes_per_s = 200_000
    assert daemon.admin_url is not None
    address = daemon.admin_url.removeprefix("http://")
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}

    def ctl(*arguments: str) -> str:
        done = run_machd(["ctl", "--address", address, "models", *arguments], environ)
        assert done.returncode == 0, done.stderr
        return done.stdout

    pull = {"model": _LARGE}
    with httpx.stream("POST", f"{daemon.url}/api/pull", json=pull, timeout=CEILING_S):
        wait_until(lambda: listed().get(_LARGE, {}).get("completed_bytes", 0) > 0, "some has come")
        told = listed()[_LARGE]
        assert told["state"] == told["status"]["value"] == "downloading"
        assert _LARGE_BYTES <= told["size_bytes"] < _LARGE_BYTES + 1000
        assert 0 < told["completed_bytes"] < told["size_bytes"]
        assert 0 <= told["progress"] < 1
        assert list(listed()) == ["alpha", "beta", _LARGE]
        download = json.loads(ctl("--json"))["download"]
        assert (download["model"], download["total_bytes"]) == (_LARGE, told["size_bytes"])
        assert f"downloading {_LARGE}: " in ctl()
    wait_until(lambda: _LARGE not in listed(), "the download has stopped")
    assert json.loads(ctl("--json"))["download"] is None
