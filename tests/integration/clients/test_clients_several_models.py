"""Ollama's and OpenAI's own clients and a daemon with several models: they list, load, use and unload them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import ollama
import openai
import pytest
from huggingface_hub import constants
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.loopback_hub import LoopbackHub
from support.daemon.supervised_daemon import SupervisedDaemon

_NAMES = ("alpha", "org/beta", "gamma")
_TABLES = "".join(f'[models."{name}"]\npath = "fake?size=35000000"\n' for name in _NAMES)
_SAY = "say yes"


@pytest.fixture(name="url")
def _url(tmp_path: Path) -> Iterator[str]:
    config = tmp_path / "machd.toml"
    config.write_text(f"[models]\nmemory_gb = 1.0\n{_TABLES}")
    with capture_logs(), SupervisedDaemon({"cache.prefix": False}, config_path=config) as daemon:
        yield daemon.url


def test_ollamas_client_lists_loads_uses_and_unloads_models(url: str) -> None:
    """Every model is listed with a tag, whose name ``chat`` takes; ``ps`` tells when it leaves."""
    with ollama.Client(host=url, timeout=CEILING_S) as client:

        def running() -> list[str | None]:
            return [one.model for one in client.ps().models]

        listed = [str(one.model) for one in client.list().models]
        assert listed == [f"{name}:latest" for name in _NAMES]
        assert running() == []
        assert client.generate(listed[1]).done_reason == "load"
        assert running() == [listed[1]]
        assert client.show(listed[1]).capabilities == ["completion", "tools", "thinking"]
        message = [{"role": "user", "content": _SAY}]
        assert client.chat(listed[0], message, keep_alive="1h").message.content == "yes"
        expires = {one.model: one.expires_at for one in client.ps().models}[listed[0]]
        assert expires is not None
        assert 3000 < (expires - datetime.now(UTC)).total_seconds() <= 3601
        assert client.generate(listed[0], keep_alive=-1).done_reason == "load"
        kept = {one.model: one.expires_at for one in client.ps().models}[listed[0]]
        assert kept is not None
        assert kept.year > 2300
        assert client.generate(listed[1], keep_alive=0).done_reason == "unload"
        wait_until(lambda: running() == [listed[0]], "it is unloaded")
        with pytest.raises(ollama.ResponseError, match=r"models\.directory"):
            client.delete(listed[0])
        with pytest.raises(ollama.ResponseError, match=r"models\.directory"):
            client.copy(listed[0], "another")
        with pytest.raises(ollama.ResponseError) as unknown:
            client.generate("delta", _SAY)
    assert unknown.value.status_code == 404


def test_ollamas_client_pulls_a_model_and_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the progress to ``success``; then the model is listed and answers, without a restart."""
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(3_000_000)}
    config = tmp_path / "machd.toml"
    config.write_text(f"[model]\noffline = false\n[models]\nhub_cache = true\n{_TABLES}")
    cache = tmp_path / "hf" / "hub"
    cache.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    with LoopbackHub({"org/name": files}, bytes_per_s=2e6) as hub, capture_logs():
        for name, value in hub.environ(tmp_path).items():
            monkeypatch.setenv(name, value)
        with (
            SupervisedDaemon({"cache.prefix": False}, config_path=config) as daemon,
            ollama.Client(host=daemon.url, timeout=CEILING_S) as client,
        ):
            told = list(client.pull("hf.co/org/name", stream=True))
            assert told[0].status == "pulling manifest"
            assert max(one.total or 0 for one in told) == 3_000_000
            assert told[-1].status == "success"
            assert client.list().models[-1].model == "org/name:latest"
            message = [{"role": "user", "content": _SAY}]
            assert client.chat("org/name", message).message.content == "yes"
            with pytest.raises(ollama.ResponseError, match="org/none"):
                list(client.pull("org/none", stream=True))


def test_openais_client_lists_and_uses_models(url: str) -> None:
    """Fields of a model that the package does not know are there beside those that it does."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=CEILING_S) as client:
        listed = {one.id: one for one in client.models.list()}
        assert list(listed) == list(_NAMES)
        assert listed["gamma"].to_dict()["state"] == "unloaded"
        answer = client.chat.completions.create(
            model="gamma", messages=[{"role": "user", "content": _SAY}], extra_body={"ttl": 600}
        )
        assert (answer.model, answer.choices[0].message.content) == ("gamma", "yes")
        assert client.models.retrieve("gamma").to_dict()["state"] == "ready"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("delta")
