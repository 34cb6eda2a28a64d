"""The names under which requests reach the one served model."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat

_CHAT = "/v1/chat/completions"
_FLAGS = {"models.aliases": ("gpt-4o-mini", "Acme/House-Model")}

_KNOWN = (
    "fake",
    "FAKE",
    "fake:latest",
    "openai/fake",
    "default",
    "gpt-4o-mini",
    "openai/GPT-4o-mini",
    "house-model",
    "acme/house-model:latest",
)
_UNKNOWN = ("claude-sonnet-4-5", "qwen3:8b", "openrouter/meta/llama-3", "my model")
_NO_NAMES = (
    "/etc/passwd",
    "../fake",
    "~/fake",
    "./fake",
    ".fake",
    "a/../fake",
    "https://example.org/fake",
    "file:///fake",
    "C:\\fake",
    "fake\n",
    "fa\x00ke",
    "a//fake",
    "a/b/c/fake",
    " ",
)


@pytest.fixture(name="tolerant", scope="module")
def _tolerant() -> Iterator[httpx.Client]:
    with (
        RunningDaemon(flags=_FLAGS) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


@pytest.fixture(name="strict", scope="module")
def _strict() -> Iterator[httpx.Client]:
    with (
        RunningDaemon(flags={**_FLAGS, "models.accept_any": False}) as daemon,
        httpx.Client(base_url=daemon.url, timeout=CEILING_S) as client,
    ):
        yield client


@pytest.mark.parametrize("name", _KNOWN)
def test_known_name_is_served_in_any_spelling(strict: httpx.Client, name: str) -> None:
    """Case, organisation and ``:latest`` do not matter, and the answer carries the real name."""
    answer = strict.post(_CHAT, json={**chat(max_tokens=2), "model": name})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "fake"
    assert strict.get(f"/v1/models/{name}").json()["id"] == "fake"


def test_aliases_are_listed_behind_the_models_own_name(strict: httpx.Client) -> None:
    """A client that offers what is listed offers them, and one that takes the first gets the real name."""
    names = ["fake", "gpt-4o-mini", "Acme/House-Model"]
    listed = strict.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == names
    assert len({one["max_model_len"] for one in listed}) == 1
    version = {"anthropic-version": "2023-06-01"}
    page = strict.get("/v1/models", headers=version).json()
    assert [one["id"] for one in page["data"]] == names
    assert (page["first_id"], page["last_id"]) == (names[0], names[-1])


@pytest.mark.parametrize("name", [*_UNKNOWN, *_NO_NAMES])
def test_unknown_name_is_not_found_unless_any_is_accepted(strict: httpx.Client, name: str) -> None:
    """Without ``models.accept_any`` another model's name is a 404 that names the served one."""
    answer = strict.post(_CHAT, json={**chat(max_tokens=2), "model": name})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "'fake'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", _UNKNOWN)
def test_any_name_is_served_on_loopback(tolerant: httpx.Client, name: str) -> None:
    """A daemon on loopback takes every name, and the answer carries the real one."""
    for path, body in (
        (_CHAT, {**chat(max_tokens=2), "model": name}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2, "model": name}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "model": name}),
        ("/v1/messages", {**chat(max_tokens=2), "model": name}),
    ):
        answer = tolerant.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "fake"


@pytest.mark.parametrize("name", _NO_NAMES)
def test_what_is_no_name_is_never_served(tolerant: httpx.Client, name: str) -> None:
    """A path, a URL and control characters are a mistake or an attack: 404 even where any name goes."""
    answer = tolerant.post(_CHAT, json={**chat(max_tokens=2), "model": name})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert name not in answer.json()["error"]["message"].replace("'fake'", "") or name == " "


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": ""}])
def test_model_may_be_left_out_where_any_is_accepted(
    tolerant: httpx.Client, strict: httpx.Client, fields: dict[str, object]
) -> None:
    """A request without a model gets the served one, or a 400 that says what is missing."""
    body = {key: value for key, value in chat(max_tokens=2).items() if key != "model"} | fields
    assert tolerant.post(_CHAT, json=body).json()["model"] == "fake"
    refusal = strict.post(_CHAT, json=body)
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "model")
