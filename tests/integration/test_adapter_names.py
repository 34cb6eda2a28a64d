"""Adapters by name over HTTP: which rows they compute, under which names, and what is told of those that cannot be used.

The scripted engine answers with the adapters of its row, so that another one's answer shows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.checkpoints.served_adapters import said, write_adapter
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat, completion, says_its_adapters, sse_text
from support.engines.fake_engine import FakeEngine

from machd.capabilities.evidence import Evidence, Outcome, ProbeResult
from machd.engine_process.startup_guard import Measures

_CHAT = "/v1/chat/completions"
_NOTHING = (
    "fake:unknown",
    "fake:",
    ":support",
    "fake:fake:support",
    "unknown:support",
    "support:style",
    "support:fake",
    "openai/fake:unknown:latest",
    "fake:../support",
    "fake:/etc/passwd",
    "../support",
    "/srv/support",
    "./support",
    "support/../style",
    "file:///support",
    "sup\x00port",
    "support\n",
    "fake:sup\x1bport",
    "fake:support\u202e",
    "hidden",
    "outside",
    "damaged/adapter_config.json",
)


def _engine() -> FakeEngine:
    return FakeEngine(says_its_adapters)


@pytest.fixture(name="directory")
def _directory(tmp_path: Path) -> Path:
    return _write_adapters(tmp_path)


def _write_adapters(tmp_path: Path) -> Path:
    directory = tmp_path / "adapters"
    write_adapter(directory / "support", 1)
    write_adapter(directory / "Style", 2)
    write_adapter(directory / "files.gguf", 3)
    write_adapter(directory / ".hidden", 4)
    write_adapter(tmp_path / "elsewhere" / "outside", 5)
    (directory / "outside").symlink_to(tmp_path / "elsewhere" / "outside")
    (directory / "nothing").mkdir()
    (directory / "notes.txt").write_text("no adapter")
    return directory


@pytest.fixture(name="client")
def _client(directory: Path) -> Iterator[httpx.Client]:
    with _served(directory) as client:
        yield client


@pytest.fixture(name="unchanged", scope="module")
def _unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client whose daemon has the same adapters, which no test changes."""
    with _served(_write_adapters(tmp_path_factory.mktemp("unchanged"))) as client:
        yield client


@contextmanager
def _served(directory: Path) -> Iterator[httpx.Client]:
    with (
        RunningDaemon(_engine, {"adapters.directory": str(directory)}) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


def _said(client: httpx.Client, model: str, **fields: object) -> tuple[str, str]:
    """The text of a chat, and the model that it names."""
    answer = client.post(_CHAT, json={**chat(), "model": model, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["model"]


@pytest.mark.parametrize(
    "name",
    [
        "support",
        "SUPPORT",
        "support:latest",
        "fake:support",
        "default:support",
        "openai/fake:Support",
        "fake:support:latest",
    ],
)
def test_adapter_answers_under_its_name_alone_and_behind_its_models(
    client: httpx.Client, directory: Path, name: str
) -> None:
    """Every spelling reaches its rows, and the answer carries the name that lists have."""
    assert _said(client, name) == (said(directory / "support"), "support")
    assert client.get(f"/v1/models/{name}").json()["id"] == "support"


def test_rows_of_adapters_and_of_the_model_are_never_mixed_up(
    client: httpx.Client, directory: Path
) -> None:
    """Many requests at a time with equal prompts: each answer is of the adapter that it named, or of none."""
    expected = {
        "support": said(directory / "support"),
        "Style": said(directory / "Style"),
        "files": said(directory / "files.gguf"),
        "fake": "base",
    }
    asked = [*expected] * 12

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda model: _said(client, model), asked))

    assert answers == [(expected[model], model) for model in asked]


@pytest.mark.parametrize("name", _NOTHING)
def test_name_of_nothing_is_answered_by_no_model(unchanged: httpx.Client, name: str) -> None:
    """Neither a misspelt adapter nor a path gets the model's own answer; nothing outside of the directory is served."""
    answer = unchanged.post(_CHAT, json={**chat(), "model": name})

    assert answer.status_code == 404, answer.text
    assert answer.json()["error"]["code"] == "model_not_found"


def test_very_long_name_is_refused(unchanged: httpx.Client) -> None:
    """10,000 characters are no name, whatever they begin with."""
    answer = unchanged.post(_CHAT, json={**chat(), "model": "fake:" + "a" * 10_000})

    assert answer.status_code == 400, answer.text


def test_misspelt_adapter_is_refused_where_every_name_is_accepted(directory: Path) -> None:
    """A model's name before the colon says that an adapter was meant; any other name means the model."""
    flags = {"adapters.directory": str(directory), "models.accept_any": True}
    with (
        RunningDaemon(_engine, flags) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        assert _said(client, "gpt-4o")[0] == "base"
        assert _said(client, "qwen3:8b")[0] == "base"
        assert client.post(_CHAT, json={**chat(), "model": "fake:supporting"}).status_code == 404


def test_every_door_computes_with_the_adapter_that_it_is_asked_for(
    client: httpx.Client, directory: Path
) -> None:
    """Chat, text, responses, Anthropic's and Ollama's: text and name are the adapter's, streamed or not."""
    expected = said(directory / "support")
    user = [{"role": "user", "content": "hi"}]

    def post(path: str, body: dict[str, object]) -> Any:
        answer = client.post(path, json={"model": "support", **body})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "support"
        return answer.json()

    text = post("/v1/completions", {"prompt": "hi"})
    assert text["choices"][0]["text"] == expected
    message = post("/v1/messages", {"messages": user, "max_tokens": 90})
    assert message["content"][0]["text"] == expected
    response = post("/v1/responses", {"input": "hi"})
    assert response["output"][0]["content"][0]["text"] == expected
    ollama = {"messages": user, "stream": False}
    assert post("/api/chat", ollama)["message"]["content"] == expected
    generated = post("/api/generate", {"prompt": "hi", "stream": False})
    assert generated["response"] == expected
    streamed = client.post(_CHAT, json={**chat(), "model": "fake:support", "stream": True})
    assert sse_text(streamed.content) == expected
    assert b'"model":"support"' in streamed.content


def test_lists_tell_adapters_with_their_parent(unchanged: httpx.Client) -> None:
    """Each list has them behind the models, under the names that answers have."""
    names = ["Style", "files", "support"]

    cards = unchanged.get("/v1/models").json()["data"]
    assert [one["id"] for one in cards] == ["fake", *names]
    assert [one.get("parent") for one in cards] == [None, "fake", "fake", "fake"]
    assert [one.get("root") for one in cards] == [None, *names]
    assert all(one["size_bytes"] > 0 for one in cards[1:])
    anthropic = unchanged.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [one["id"] for one in anthropic["data"]] == ["fake", *names]
    assert anthropic["last_id"] == "support"
    tags = unchanged.get("/api/tags").json()["models"]
    assert [one["name"] for one in tags] == ["fake", *names]
    assert [one["details"]["parent_model"] for one in tags] == ["", "fake", "fake", "fake"]
    assert len({one["digest"] for one in tags}) == len(tags)
    assert [one["key"] for one in unchanged.get("/api/v1/models").json()["models"]] == [
        "fake",
        *names,
    ]
    assert [one["id"] for one in unchanged.get("/api/v0/models").json()["data"]] == ["fake", *names]
    shown = unchanged.post("/api/show", json={"model": "support"}).json()
    assert shown["details"]["parent_model"] == "fake"
    told = unchanged.get("/v1/capabilities").json()["adapters"]
    assert [(one["id"], one["max_rank"], one["format"]) for one in told] == [
        ("Style", 2, "mlx-lm"),
        ("files", 2, "GGUF"),
        ("support", 2, "mlx-lm"),
    ]


def test_changed_files_are_a_new_adapter_at_the_next_request(
    client: httpx.Client, directory: Path
) -> None:
    """No reload is needed, and the same content under another name is the same adapter."""
    before, other = said(directory / "support"), said(directory / "Style")
    assert _said(client, "support")[0] == before

    write_adapter(directory / "support", 2)

    assert _said(client, "support")[0] == said(directory / "support") != before
    assert said(directory / "support").split("*")[2] == other.split("*")[2]
    with capture_logs() as logs:
        shutil.rmtree(directory / "support")
        answers = [client.post(_CHAT, json={**chat(), "model": "support"}) for _ in range(3)]

    assert [one.status_code for one in answers] == [503] * 3
    assert [one.json()["error"]["code"] for one in answers] == ["adapter_not_loaded"] * 3
    assert str(directory) not in answers[0].text
    assert [one["name"] for one in logs if one["event"] == "adapter.refused"] == ["support"]


def test_damaged_adapter_is_in_no_list_and_tells_its_reason(
    directory: Path, tmp_path: Path
) -> None:
    """It is refused by name with 503 and logged once; mended files are served at the next request."""
    file = directory / "support" / "adapters.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    (directory / "Style" / "adapter_config.json").write_text('{"fine_tune_type": "full"}')

    with (
        capture_logs() as logs,
        RunningDaemon(_engine, {"adapters.directory": str(directory)}) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        for _ in range(2):
            assert [one["id"] for one in client.get("/v1/models").json()["data"]] == [
                "fake",
                "files",
            ]
            for name in ("support", "fake:Style"):
                answer = client.post(_CHAT, json={**chat(), "model": name})
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "adapter_not_loaded"
                assert "cannot be used: " in answer.json()["error"]["message"]
                assert str(tmp_path) not in answer.text
        assert _said(client, "fake")[0] == "base"
        refused = [one["name"] for one in logs if one["event"] == "adapter.refused"]
        assert sorted(refused) == ["Style", "support"]

        file.write_bytes(whole)

        assert _said(client, "support")[0] == said(directory / "support")


def test_tables_name_path_scale_and_base(directory: Path, tmp_path: Path) -> None:
    """A table may lie anywhere and has its scale; one without a path is of the directory; a reload takes both on."""
    config = tmp_path / "machd.toml"
    table = f"[adapters]\ndirectory = '{directory}'\n[adapters.support]\nscale = 0.5\nbase = 'default'\n"
    far = f"[adapters.far]\npath = '{tmp_path / 'elsewhere' / 'outside'}'\nscale = 2\n"
    config.write_text(table + far)
    with (
        RunningDaemon(_engine, config_path=config) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        assert _said(client, "support")[0] == said(directory / "support", 0.5)
        outside = tmp_path / "elsewhere" / "outside"
        assert _said(client, "fake:far") == (said(outside, 2, name="far"), "far")
        assert "path" not in client.get("/v1/models/far").json()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("[adapters.a]\npath = '/a'\nbase = 'unknown'", "adapters.a.base: no model of this name"),
        ("[adapters]\ndirectory = '/nowhere/at/all'", "adapters.directory: /nowhere/at/all cannot"),
        ("[adapters]\ndirectory = '{}'\n[adapters.b]", "adapters.b: adapters.directory holds no "),
    ],
)
def test_adapters_that_cannot_be_found_keep_the_daemon_from_starting(
    table: str, problem: str, directory: Path, tmp_path: Path
) -> None:
    """The operator is told which setting to mend."""
    config = tmp_path / "machd.toml"
    config.write_text(table.replace("{}", str(directory)))

    with pytest.raises(Exception, match=problem), RunningDaemon(_engine, config_path=config):
        pass


def test_listed_adapters_count_together_with_their_scales(
    client: httpx.Client, directory: Path
) -> None:
    """llama.cpp's ids and scales: several at once, 0 leaves one out, and the answer is the model's."""
    listed = client.get("/lora-adapters").json()
    assert [one["path"] for one in listed] == ["Style", "files", "support"]
    assert [one["scale"] for one in listed] == [0.0] * 3
    numbers = {one["path"]: one["id"] for one in listed}
    style, support = said(directory / "Style", 0.25), said(directory / "support", -1)

    def asked(**scales: float) -> str:
        lora = [{"id": numbers[name], "scale": scale} for name, scale in scales.items()]
        text, model = _said(client, "fake", lora=lora)
        assert model == "fake"
        return text

    assert asked(support=-1) == support
    assert sorted(asked(Style=0.25, support=-1, files=0).split("+")) == sorted([style, support])
    assert asked(Style=0.25, support=-1) == asked(support=-1, Style=0.25)
    assert asked(Style=0) == asked() == "base"
    filled = client.post("/v1/completions", json=completion(lora=[{"id": 0, "scale": 1}]))
    assert filled.json()["choices"][0]["text"] == said(directory / "Style")


@pytest.mark.parametrize(
    ("model", "lora"),
    [
        ("fake", [{"id": 99, "scale": 1.0}]),
        ("fake", [{"id": -1, "scale": 1.0}]),
        ("fake", [{"id": 0, "scale": 1.0}, {"id": 0, "scale": 0.5}]),
        ("fake", [{"id": 0}]),
        ("fake", [{"id": "support", "scale": 1.0}]),
        ("fake", [{"id": 0, "scale": 1e9}]),
        ("fake", [{"id": number, "scale": 1.0} for number in range(17)]),
        ("support", [{"id": 0, "scale": 1.0}]),
    ],
)
def test_wrong_list_of_adapters_is_refused(
    unchanged: httpx.Client, model: str, lora: list[dict[str, object]]
) -> None:
    """An id of none, one twice, a scale that is none or absurd, too many, or a list beside an adapter's name."""
    answer = unchanged.post(_CHAT, json={**chat(), "model": model, "lora": lora})

    assert answer.status_code == 400, answer.text
    assert "lora" in answer.text


def test_scales_for_all_requests_are_refused_in_words(unchanged: httpx.Client) -> None:
    """llama.cpp's POST would change the answers of other clients."""
    answer = unchanged.post("/lora-adapters", json=[{"id": 0, "scale": 1.0}])

    assert answer.status_code == 400
    assert "send lora with each request" in answer.json()["error"]["message"]


class _MeasuredDaemon(RunningDaemon):
    """A daemon that knows what a probe of adapters has found."""

    def _measures(self) -> Measures:
        result = ProbeResult("adapters", Outcome.FAILED, "rows differ", Evidence(3, 1.0, 0.0, 8))
        return Measures(recall=lambda _engine: (result,))


def test_adapters_are_refused_where_they_were_measured_to_be_wrong(directory: Path) -> None:
    """The verdict of the capabilities is the reason of the refusal, and the model serves on without them."""
    with (
        _MeasuredDaemon(_engine, {"adapters.directory": str(directory)}) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        verdict = client.get("/v1/capabilities").json()["batched_adapters"]
        refused = client.post(_CHAT, json={**chat(), "model": "support"})
        listed = client.post(
            _CHAT, json={**chat(), "model": "fake", "lora": [{"id": 0, "scale": 1}]}
        )

        assert verdict["verdict"] == "blocked"
        assert "serve it without adapters" in verdict["reason"]
        for answer in (refused, listed):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "adapter_not_loaded")
            assert verdict["reason"] in error["message"]
        assert _said(client, "fake") == ("base", "fake")
