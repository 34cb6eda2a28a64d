"""Several models through the doors of other servers: they list, load, use, keep and unload models in those servers' words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.keys import locked_by
from support.daemon.supervised_daemon import SupervisedDaemon
from support.engines.dialogue import chat

_KEY = "k-0123456789abcdef"
_TOKEN = "operator-token-0123456789"
_NAMES = ["alpha", "org/beta", "gamma"]
_TABLES = """
[models]
memory_gb = 1.0

[models.alpha]
path = "fake?size=35000000"
aliases = ["gpt-4o"]

[models."org/beta"]
path = "fake?size=35000000"

[models.gamma]
path = "fake?size=35000000"
aliases = ["small"]
"""

_FAKE: dict[str, object] = {
    "continuous_batching.enabled": True,
    "continuous_batching.max_b": 8,
    "cache.prefix": False,
}


def _daemon(directory: Path, text: str = _TABLES, **flags: object) -> SupervisedDaemon:
    config = directory / "machd.toml"
    config.write_text(text)
    return SupervisedDaemon(_FAKE | flags, config_path=config)


def _client(daemon: SupervisedDaemon, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=daemon.url, timeout=CEILING_S, **options)


@pytest.fixture(name="http")
def _http(tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a daemon on loopback without keys, none of whose models is loaded."""
    with capture_logs(), _daemon(tmp_path) as daemon, _client(daemon) as client:
        yield client


@pytest.fixture(name="locked")
def _locked(tmp_path: Path) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A client with an API key, and one with the admin token."""
    flags = locked_by(tmp_path, api_key=_KEY, admin_token=_TOKEN)
    with ExitStack() as stack:
        stack.enter_context(capture_logs())
        daemon = stack.enter_context(_daemon(tmp_path, **flags))
        client, operator = (
            stack.enter_context(_client(daemon, headers={"Authorization": f"Bearer {secret}"}))
            for secret in (_KEY, _TOKEN)
        )
        yield client, operator


def _listed(http: httpx.Client, path: str = "/v1/models") -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in http.get(path).raise_for_status().json()["data"]}


def _status(http: httpx.Client, name: str) -> str:
    return str(_listed(http, "/models")[name]["status"]["value"])


def _loaded(http: httpx.Client) -> list[str]:
    models = http.get("/api/ps").raise_for_status().json()["models"]
    return [one["name"].removesuffix(":latest") for one in models]


def _ask(http: httpx.Client, model: str, **fields: object) -> httpx.Response:
    return http.post("/v1/chat/completions", json=chat("say yes") | {"model": model} | fields)


def _generate(http: httpx.Client, model: str, **fields: object) -> httpx.Response:
    return http.post("/api/generate", json={"model": model, "stream": False} | fields)


def test_every_model_is_listed_before_it_is_loaded(http: httpx.Client) -> None:
    """With what is known: names, aliases and state; more once it is loaded, and still after it was unloaded."""
    models = _listed(http)
    assert list(models) == [*_NAMES, "gpt-4o", "small"]
    assert models["gamma"] == {
        "id": "gamma",
        "object": "model",
        "created": 0,
        "owned_by": "machd",
        "state": "unloaded",
        "aliases": ["small"],
        "in_cache": False,
        "status": {"value": "unloaded"},
    }
    assert models["small"] == models["gamma"] | {"id": "small"}
    assert http.get("/v1/models/org/beta").json() == models["org/beta"]

    assert _ask(http, "small").status_code == 200
    loaded = http.get("/v1/models/gamma").json()
    assert (loaded["state"], loaded["status"]) == ("ready", {"value": "loaded"})
    assert loaded["max_model_len"] == 10_000
    assert {"chat", "tools"} <= set(loaded["capabilities"])
    assert "size_bytes" in loaded

    http.post("/models/unload", json={"model": "gamma"}).raise_for_status()
    wait_until(lambda: _status(http, "gamma") == "unloaded", "it is unloaded")
    unloaded = http.get("/v1/models/gamma").json()
    assert unloaded["max_model_len"] == 10_000


def test_every_model_is_listed_in_anthropics_shape(http: httpx.Client) -> None:
    """The time of files that are not known is the beginning of 1970, as Anthropic has it."""
    page = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [one["id"] for one in page["data"]] == [*_NAMES, "gpt-4o", "small"]
    assert (page["first_id"], page["last_id"]) == ("alpha", "small")
    assert {one["created_at"] for one in page["data"]} == {"1970-01-01T00:00:00Z"}


def test_llama_cpps_router_loads_and_unloads(http: httpx.Client) -> None:
    """Its page asks which kind of server this is, has a model loaded, and asks for its properties."""
    props = http.get("/props").json()
    assert (props["role"], props["models_autoload"], props["max_instances"]) == ("router", True, 3)
    assert http.get("/props", params={"model": "alpha"}).status_code == 503
    assert http.post("/models/load", json={"model": "alpha"}).json() == {"success": True}
    wait_until(lambda: _status(http, "alpha") == "loaded", "it is loaded")
    assert http.post("/models/load", json={"model": "alpha"}).json() == {"success": True}
    assert http.get("/props", params={"model": "alpha"}).json()["model_alias"] == "alpha"
    assert len(http.get("/slots", params={"model": "gpt-4o"}).json()) == 8
    assert http.post("/models/unload", json={"model": "alpha"}).json() == {"success": True}
    wait_until(lambda: _status(http, "alpha") == "unloaded", "it is unloaded")
    assert http.post("/models/load", json={"model": "delta"}).status_code == 404


def test_a_model_that_is_loaded_again_before_it_is_idle_stays(http: httpx.Client) -> None:
    """Its unloading is taken back."""
    text = "an answer that goes on and on " * 8
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_ask, http, "alpha", messages=chat(f"say {text}")["messages"])
        wait_until(lambda: _status(http, "alpha") == "loaded", "it is loaded")
        for verb in ("unload", "load"):
            http.post(f"/models/{verb}", json={"model": "alpha"}).raise_for_status()
        assert not answer.done()
        assert answer.result(CEILING_S).status_code == 200
    assert _status(http, "alpha") == "loaded"


def test_llama_cpps_page_chats(http: httpx.Client) -> None:
    """Its page asks for progress, pings and timings with every message, for a model that is not loaded, too."""
    body = chat("say yes") | {
        "model": "org/beta",
        "stream": True,
        "return_progress": True,
        "sse_ping_interval": 1,
        "reasoning_format": "auto",
        "reasoning_control": True,
        "timings_per_token": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "thinking_budget_tokens": 512,
        "temperature": 0.8,
        "dynatemp_range": 0,
        "dynatemp_exponent": 1,
        "max_tokens": -1,
        "typ_p": 1,
        "xtc_probability": 0,
        "repeat_last_n": 64,
        "repeat_penalty": 1,
        "dry_multiplier": 0,
        "dry_penalty_last_n": -1,
        "backend_sampling": False,
    }
    headers = {"X-Conversation-Id": "0b0c::org/beta"}
    with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as stream:
        assert stream.status_code == 200
        # It reads lines that begin so, and nothing else.
        data = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(one) for one in data[:-1]]
    deltas = [choice["delta"] for one in chunks for choice in one["choices"]]
    assert "".join(one.get("content") or "" for one in deltas) == "yes"
    assert {one["model"] for one in chunks} == {"org/beta"}


def test_a_model_that_cannot_be_loaded_is_told_as_failed(tmp_path: Path) -> None:
    """In the words that llama.cpp's page looks for."""
    text = f'{_TABLES}\n[models.broken]\npath = "fake?fails=1"\n'
    with capture_logs(), _daemon(tmp_path, text) as daemon, _client(daemon) as http:
        http.post("/models/load", json={"model": "broken"}).raise_for_status()
        wait_until(lambda: _listed(http)["broken"]["state"] == "failed", "it has failed")
        status = _listed(http)["broken"]["status"]
    assert status == {"value": "unloaded", "failed": True, "exit_code": 1}


def test_autoload_in_a_query_says_whether_a_request_loads(http: httpx.Client) -> None:
    """As for llama.cpp's router."""
    refused = http.post(
        "/v1/chat/completions",
        params={"autoload": "false"},
        json=chat("say yes") | {"model": "alpha"},
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
    assert "autoload=false" in refused.json()["error"]["message"]
    assert _status(http, "alpha") == "unloaded"


def test_ollamas_lists_tell_all_models_and_those_in_memory(http: httpx.Client) -> None:
    """A digest does not change when a model is loaded."""
    before = http.get("/api/tags").json()["models"]
    assert [one["name"] for one in before] == [f"{name}:latest" for name in _NAMES]
    assert _loaded(http) == []
    shown = http.post("/api/show", json={"model": "alpha"}).json()
    assert (shown["capabilities"], shown["model_info"]) == (["completion"], {})

    loaded = _generate(http, "alpha").json()
    assert (loaded["done_reason"], loaded["response"]) == ("load", "")
    assert _loaded(http) == ["alpha"]
    (running,) = http.get("/api/ps").json()["models"]
    assert running["expires_at"].startswith("23")
    after = http.get("/api/tags").json()["models"]
    assert [one["digest"] for one in after] == [one["digest"] for one in before]
    assert after[0]["details"]["family"]
    assert "tools" in http.post("/api/show", json={"model": "alpha"}).json()["capabilities"]


def test_keep_alive_says_when_a_model_is_unloaded(http: httpx.Client) -> None:
    """A duration counts from the last answer's end, a negative one is for ever, and 0 ends with the answer."""
    assert _generate(http, "alpha", prompt="say yes", keep_alive="5m").json()["response"] == "yes"
    (running,) = http.get("/api/ps").json()["models"]
    left_s = (datetime.fromisoformat(running["expires_at"]) - datetime.now(UTC)).total_seconds()
    assert 200 < left_s <= 301
    _generate(http, "alpha", keep_alive=-1).raise_for_status()
    (running,) = http.get("/api/ps").json()["models"]
    assert running["expires_at"].startswith("23")
    assert _generate(http, "alpha", prompt="say yes", keep_alive=0).json()["response"] == "yes"
    wait_until(lambda: _loaded(http) == [], "it is unloaded once its answer has ended")
    _generate(http, "alpha", prompt="say yes", keep_alive="300ms").raise_for_status()
    wait_until(lambda: _loaded(http) == [], "it is unloaded once its time is over")
    assert _generate(http, "alpha", keep_alive="soon").status_code == 400


def test_empty_prompt_with_keep_alive_0_unloads(http: httpx.Client) -> None:
    """As Open WebUI and ``ollama stop`` send it; a model that is not loaded is not loaded for it."""
    _generate(http, "alpha").raise_for_status()
    answer = _generate(http, "alpha:latest", prompt="", keep_alive=0).json()
    assert (answer["model"], answer["done"], answer["done_reason"]) == ("alpha", True, "unload")
    wait_until(lambda: _loaded(http) == [], "it is unloaded")
    empty = {"model": "org/beta", "messages": [], "keep_alive": 0}
    assert http.post("/api/chat", json=empty).json()["done_reason"] == "unload"
    assert _loaded(http) == []


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/api/delete"), ("POST", "/api/copy"), ("POST", "/api/create")]
)
def test_files_are_not_changed_over_ollamas_api(http: httpx.Client, method: str, path: str) -> None:
    """Its envelope says what to do in place of that."""
    answer = http.request(method, path, json={"model": "alpha"})
    assert answer.status_code == 404
    assert "models.directory" in answer.json()["error"]


def test_lm_studios_api_lists_loads_and_unloads(http: httpx.Client) -> None:
    """Fields are those of its documentation; a load answers once the model is there."""
    old = _listed(http, "/api/v0/models")
    assert old["org/beta"] == {
        "id": "org/beta",
        "object": "model",
        "type": "llm",
        "publisher": "org",
        "compatibility_type": "mlx",
        "state": "not-loaded",
    }
    body = {"model": "org/beta", "context_length": 4096, "echo_load_config": True}
    loaded = http.post("/api/v1/models/load", json=body).json()
    assert loaded.pop("load_time_seconds") >= 0
    assert loaded == {
        "type": "llm",
        "instance_id": "org/beta",
        "status": "loaded",
        "load_config": {"context_length": 10_000},
    }
    model = http.get("/api/v0/models/org/beta").json()
    assert (model["state"], model["loaded_context_length"]) == ("loaded", 10_000)
    models = {one["key"]: one for one in http.get("/api/v1/models").json()["models"]}
    assert list(models) == _NAMES
    assert models["org/beta"]["loaded_instances"] == [
        {"id": "org/beta", "config": {"context_length": 10_000}}
    ]
    assert models["org/beta"]["capabilities"]["trained_for_tool_use"] is True
    assert models["alpha"]["loaded_instances"] == []
    unloaded = http.post("/api/v1/models/unload", json={"instance_id": "org/beta"})
    assert unloaded.json() == {"instance_id": "org/beta"}
    wait_until(lambda: _loaded(http) == [], "it is unloaded")
    unknown = http.post("/api/v1/models/load", json={"model": "delta"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_ttl_in_a_request_is_the_models_time_to_live(http: httpx.Client) -> None:
    """In seconds without a request, as LM Studio has it."""
    assert _ask(http, "alpha", ttl=0.3).status_code == 200
    wait_until(lambda: _loaded(http) == [], "its time is over")
    assert _ask(http, "alpha", ttl="soon").status_code == 400


def test_a_model_that_its_table_pins_stays_loaded(tmp_path: Path) -> None:
    """Whatever requests say of its time to live."""
    text = f'{_TABLES}\n[models.kept]\npath = "fake?size=35000000"\npin = true\n'
    with capture_logs(), _daemon(tmp_path, text) as daemon, _client(daemon) as http:
        assert _generate(http, "kept", prompt="say yes", keep_alive=0).json()["response"] == "yes"
        assert _generate(http, "kept", prompt="say yes", keep_alive=60).json()["response"] == "yes"
        running = {one["name"]: one for one in http.get("/api/ps").json()["models"]}
    assert running["kept:latest"]["expires_at"].startswith("23")


def test_only_an_operator_changes_what_is_loaded_where_keys_are_required(
    locked: tuple[httpx.Client, httpx.Client],
) -> None:
    """A key lists and asks, and its wishes for a time to live change nothing; the admin token does all."""
    client, operator = locked
    assert list(_listed(client))[:3] == _NAMES
    refusals = [
        client.post("/models/load", json={"model": "alpha"}),
        client.post("/models/unload", json={"model": "alpha"}),
        client.post("/api/v1/models/load", json={"model": "alpha"}),
        client.post("/api/v1/models/unload", json={"instance_id": "alpha"}),
    ]
    for one in refusals:
        assert (one.status_code, one.json()["error"]["code"]) == (403, "operator_required")
        assert "admin token" in one.json()["error"]["message"]
    assert _loaded(client) == []
    assert _ask(client, "alpha", ttl=0.1).status_code == 200
    assert _generate(client, "alpha", prompt="say yes", keep_alive=0).status_code == 200
    assert _loaded(client) == ["alpha"]
    ordered = _generate(client, "alpha", prompt="", keep_alive=0)
    assert ordered.status_code == 403
    assert "admin token" in ordered.json()["error"]

    assert _ask(operator, "alpha").status_code == 200
    operator.post("/models/load", json={"model": "gamma"}).raise_for_status()
    wait_until(lambda: _loaded(client) == ["alpha", "gamma"], "it is loaded")
    assert _generate(operator, "alpha", keep_alive=0).json()["done_reason"] == "unload"
    wait_until(lambda: _loaded(client) == ["gamma"], "it is unloaded")


def test_one_model_is_not_unloaded(tmp_path: Path) -> None:
    """It lives as long as the daemon; loading it is done already."""
    with capture_logs(), _daemon(tmp_path, "") as daemon, _client(daemon) as http:
        assert http.post("/models/load", json={"model": "fake"}).json() == {"success": True}
        refused = http.post("/models/unload", json={"model": "fake"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        answer = _generate(http, "fake", prompt="", keep_alive=0).json()
        assert answer["done_reason"] == "load"
        assert set(_listed(http)["fake"]) == {
            *("id", "object", "created", "owned_by", "max_model_len")
        }
        assert "role" not in http.get("/props").json()
