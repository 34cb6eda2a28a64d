"""A model that a daemon has fetched is served under its name at once."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants
from structlog.testing import capture_logs
from support.clients.cached_answers import Asked, ask
from support.clocks.polling import CEILING_S
from support.daemon.loopback_hub import LoopbackHub
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat

_MODEL = "org/name"


def test_a_pulled_model_is_served_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has come its name is unknown; then a request loads it. Of a GGUF file, which is not, a status says so."""
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(1000)}
    files["small.Q4_0.gguf"] = b"GGUF"
    config = tmp_path / "machd.toml"
    config.write_text(
        "[model]\noffline = false\n[models]\nhub_cache = true\n"
        '[models.alpha]\npath = "fake?size=1000"\n[models.beta]\npath = "fake?size=1000"\n'
    )
    cache = tmp_path / "hf" / "hub"
    cache.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    asked = Asked(chat("say hello") | {"model": _MODEL})
    with LoopbackHub({_MODEL: files}) as hub, capture_logs():
        for name, value in hub.environ(tmp_path).items():
            monkeypatch.setenv(name, value)
        with SupervisedDaemon({}, config_path=config) as daemon:
            unknown = httpx.post(f"{daemon.url}/v1/chat/completions", json=asked.fields)
            assert unknown.status_code == 404
            answer = httpx.post(f"{daemon.url}/api/pull", json={"model": _MODEL}, timeout=CEILING_S)
            assert json.loads(answer.text.splitlines()[-1]) == {"status": "success"}
            assert ask(daemon.url, asked).texts == ("hello",)
            order = {"model": f"hf.co/{_MODEL}:Q4_0"}
            answer = httpx.post(f"{daemon.url}/api/pull", json=order, timeout=CEILING_S)
            *_, note, last = (json.loads(line)["status"] for line in answer.text.splitlines())
            assert last == "success"
            assert "not served yet" in note
            assert "small.Q4_0.gguf" in note
            assert "[models.NAME]" in note
