"""Adapters that operators load and unload while the daemon runs, and models that take none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.checkpoints.served_adapters import said, write_adapter
from support.clocks.polling import CEILING_S
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.keys import locked_by
from support.daemon.running_daemon import RunningDaemon
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat, says_its_adapters
from support.engines.fake_encoder import FakeEncoder
from support.engines.fake_engine import FakeEngine

_CHAT = "/v1/chat/completions"
_KEY, _TOKEN = "k-0123456789abcdef", "operator-token-0123456789"
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    directory = tmp_path / "adapters"
    write_adapter(directory / "support", 1)
    return directory


@pytest.fixture(name="locked")
def _locked(tmp_path: Path, directory: Path) -> Iterator[AdminDaemon]:
    flags = locked_by(tmp_path, api_key=_KEY, admin_token=_TOKEN)
    flags["adapters.directory"] = str(directory)
    with AdminDaemon(tmp_path, lambda: FakeEngine(says_its_adapters), flags) as daemon:
        yield daemon


def _post(daemon: AdminDaemon, path: str, body: dict[str, object], key: str = _TOKEN) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return daemon.http.post(path, json=body, headers=headers)


def _asked(daemon: AdminDaemon, model: str) -> Any:
    return _post(daemon, _CHAT, {**chat(), "model": model}, _KEY)


def test_operator_loads_what_has_come_and_unloads_what_is_to_go(
    locked: AdminDaemon, directory: Path
) -> None:
    """VLLM's two endpoints with its texts; each may be repeated, and a loaded adapter is served at once."""
    assert _asked(locked, "new").status_code == 404
    assert _post(locked, _LOAD, {"lora_name": "new", "lora_path": "new"}).status_code == 404
    new = write_adapter(directory / "new", 2)
    assert _asked(locked, "new").status_code == 404  # no request looks through the directory

    for _ in range(2):
        loaded = _post(locked, _LOAD, {"lora_name": "new", "lora_path": "new"})
        assert loaded.text == "Success: LoRA adapter 'new' added successfully."
        assert _asked(locked, "new").json()["choices"][0]["message"]["content"] == said(new)
    for _ in range(2):
        unloaded = _post(locked, _UNLOAD, {"lora_name": "support"})
        assert unloaded.text == "Success: LoRA adapter 'support' removed successfully."
        for name in ("support", "fake:support"):
            refused = _asked(locked, name)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                404,
                "model_not_found",
            )
        headers = {"Authorization": f"Bearer {_KEY}"}
        listed = locked.http.get("/v1/models", headers=headers).json()["data"]
        assert [one["id"] for one in listed] == ["fake", "new"]
        assert len(locked.http.get("/lora-adapters", headers=headers).json()) == 1
    assert _post(locked, _UNLOAD, {"lora_name": "unknown"}).status_code == 404
    assert _post(locked, _LOAD, {"lora_name": "support"}).status_code == 200
    assert _asked(locked, "support").status_code == 200


def test_reload_serves_again_what_was_unloaded(locked: AdminDaemon, directory: Path) -> None:
    """As the directory has it then; another change of a setting does not."""
    assert _post(locked, _UNLOAD, {"lora_name": "support"}).status_code == 200
    write_adapter(directory / "new", 2)
    assert locked.admin.put("/admin/log-level", json={"level": "debug"}).status_code == 200
    assert _asked(locked, "support").status_code == 404

    assert locked.admin.post("/admin/reload").status_code == 200

    assert _asked(locked, "support").status_code == 200
    assert _asked(locked, "new").status_code == 200
    patched = locked.admin.patch(
        "/admin/config", json={"adapters": {"other": {"path": str(directory / "new"), "scale": 3}}}
    )
    assert patched.json()["changed"] == ["adapters.other"]
    text = _asked(locked, "other").json()["choices"][0]["message"]["content"]
    assert text == said(directory / "new", 3, name="other")


@pytest.mark.parametrize("path", [_LOAD, _UNLOAD])
def test_client_is_no_operator(locked: AdminDaemon, path: str) -> None:
    """With an API key nothing changes."""
    refused = _post(locked, path, {"lora_name": "support"}, _KEY)

    assert refused.status_code == 403
    assert _asked(locked, "support").status_code == 200


@pytest.mark.parametrize(
    "lora_path", ["/srv/adapters/support", "../support", "./support", "support/", "hub/support", ""]
)
def test_path_of_a_request_is_refused(locked: AdminDaemon, directory: Path, lora_path: str) -> None:
    """Even an operator names adapters alone: files are named by the settings."""
    own = str(directory / "support")
    for path in (lora_path, own):
        answer = _post(locked, _LOAD, {"lora_name": "support", "lora_path": path})
        assert answer.status_code == 400, answer.text
        assert "names no files" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", ["../support", "/etc", "support/adapters.safetensors", ".", "..", "a\x00b", "\u202e"]
)
def test_hostile_name_loads_nothing(locked: AdminDaemon, name: str) -> None:
    """A name is looked up, never joined to a path."""
    answer = _post(locked, _LOAD, {"lora_name": name})

    assert answer.status_code == 404, answer.text


def test_damaged_adapter_is_not_loaded(locked: AdminDaemon, directory: Path) -> None:
    """The operator is told why, and no request may name it."""
    new = write_adapter(directory / "new", 2)
    (new / "adapters.safetensors").write_bytes(b"\x80\x04pickle")
    with capture_logs():
        answer = _post(locked, _LOAD, {"lora_name": "new"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_not_loaded")
    assert _asked(locked, "new").status_code == 404


def test_encoder_takes_no_adapter(directory: Path) -> None:
    """A model that generates nothing refuses one in words, and goes on without."""
    with (
        RunningDaemon(FakeEncoder, {"adapters.directory": str(directory)}) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        refused = client.post("/v1/embeddings", json={"model": "support", "input": "a"})
        assert refused.status_code == 400, refused.text
        assert "adapters are served with models that generate" in refused.text
        answered = client.post("/v1/embeddings", json={"model": "default", "input": "a"})
        assert answered.status_code == 200, answered.text


def test_adapter_belongs_to_the_model_that_its_table_names(tmp_path: Path, directory: Path) -> None:
    """Of several models: a request for it loads that one; behind another model's name it is nothing."""
    config = tmp_path / "machd.toml"
    config.write_text(
        "[models]\nmemory_gb = 1.0\n"
        "[models.alpha]\npath = 'fake?size=1000'\n"
        "[models.beta]\npath = 'fake?size=1000'\naliases = ['b']\n"
        f"[adapters]\ndirectory = '{directory}'\n"
        f"[adapters.house]\npath = '{directory / 'support'}'\nbase = 'B'\n"
    )
    with (
        capture_logs(),
        SupervisedDaemon({"cache.prefix": False}, config_path=config) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):

        def asked(model: str, **fields: object) -> tuple[int, str]:
            answer = client.post(_CHAT, json={**chat("say hello"), "model": model, **fields})
            return answer.status_code, answer.json().get("model", "")

        assert asked("beta:house") == (200, "house")
        assert asked("b:house") == (200, "house")
        assert asked("support") == (200, "support")
        assert asked("alpha:house")[0] == asked("beta:support")[0] == 404
        cards = {one["id"]: one.get("parent") for one in client.get("/v1/models").json()["data"]}
        assert cards["house"] == "beta"
        assert cards["support"] == "alpha"
        streamed = client.post(_CHAT, json={**chat("say hello"), "model": "house", "stream": True})
        assert b'"model":"house"' in streamed.content
        listed = client.get("/lora-adapters", params={"model": "beta"}).json()
        assert [one["path"] for one in listed] == ["house"]
        assert asked("alpha", lora=[{"id": listed[0]["id"], "scale": 1.0}])[0] == 400
        assert asked("beta", lora=[{"id": listed[0]["id"], "scale": 1.0}]) == (200, "beta")
