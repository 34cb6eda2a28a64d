"""Doors that clients of other servers knock at: paths without ``/v1``, the root, and llama.cpp's own."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from support.clients.bad_requests import PATHS, valid_body
from support.clients.raw_client import RawClient
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import scrape
from support.engines.dialogue import chat, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode

from machd.dialects.endpoints import PUBLIC_ENDPOINTS
from machd.http.endpoint import Endpoint

_ALIASED = [one for one in PUBLIC_ENDPOINTS if one.aliases]
_BODIES: dict[str, dict[str, object]] = {
    **{path: valid_body(path, temperature=0) for path in PATHS if path.startswith("/v1")},
    "/v1/messages/count_tokens": chat(),
    "/v1/embeddings": {"model": "fake", "input": "a"},
    "/v1/rerank": {"model": "fake", "query": "a", "documents": ["b"]},
    "/v1/score": {"model": "fake", "text_1": "a", "text_2": "b"},
    "/v1/classify": {"model": "fake", "input": "a"},
}
_VERSION = {"anthropic-version": "2023-06-01"}
_UNIQUE = ("id", "created", "created_at", "completed_at", "request_id")


@pytest.fixture(name="daemon", scope="module")
def _daemon() -> Iterator[RunningDaemon]:
    """An obedient fake engine."""
    with RunningDaemon(lambda: FakeEngine(told)) as daemon:
        yield daemon


@pytest.fixture(name="http", scope="module")
def _http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    """A client of it."""
    with httpx.Client(base_url=daemon.url) as client:
        yield client


def _without_ids(answer: object) -> object:
    """An answer less what differs from request to request."""
    if isinstance(answer, dict):
        return {key: _without_ids(value) for key, value in answer.items() if key not in _UNIQUE}
    return [_without_ids(one) for one in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize("endpoint", _ALIASED, ids=lambda one: one.name)
def test_a_path_without_v1_answers_as_the_path_with_it(
    http: httpx.Client, endpoint: Endpoint
) -> None:
    """Status, headers' names and body are the same, for right requests and for empty ones."""
    for body in (_BODIES.get(endpoint.path), {}):
        answers = [
            http.request(endpoint.method, path.replace("{id}", "fake"), json=body)
            for path in (endpoint.path, *endpoint.aliases)
        ]
        first = answers[0]
        for other in answers[1:]:
            assert other.status_code == first.status_code
            assert other.headers.keys() == first.headers.keys()
            assert _without_ids(other.json()) == _without_ids(first.json())


def test_an_official_client_without_v1_is_served(daemon: RunningDaemon) -> None:
    """OpenAI's client with a base URL that lacks ``/v1`` lists, chats, streams and keeps responses."""
    with openai.OpenAI(base_url=daemon.url, api_key="none", max_retries=0) as client:
        assert [one.id for one in client.models.list()] == ["fake"]
        assert client.models.retrieve("fake").id == "fake"
        stream = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "say hi"}], stream=True
        )
        assert "".join(one.choices[0].delta.content or "" for one in stream) == "hi"
        stored = client.responses.create(model="fake", input="say hi")
        assert client.responses.retrieve(stored.id).output_text == "hi"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "path", ["/v1/v1", "/v1/v1/models", "/v1/v1/chat/completions", "/v1/v1/v1/models", "/v1/v1/x"]
)
def test_v1_twice_is_told(http: httpx.Client, method: str, path: str) -> None:
    """A base URL that ends in ``/v1`` too much is a 404 that says so and what to write."""
    answer = http.request(method, path)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "not_found"
    assert "twice" in error["message"]
    assert "http://127.0.0.1:8080" in error["message"]


@pytest.mark.parametrize("path", ["/v1/v1x", "/v1x/v1", "/x/v1/v1/models", "/v11/v1"])
def test_v1_elsewhere_in_a_path_is_a_plain_404(http: httpx.Client, path: str) -> None:
    """What merely looks like it gets no advice that would be wrong."""
    answer = http.get(path)
    assert answer.status_code == 404
    assert "twice" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/messages", "/messages/count_tokens", "/v1/v1/messages"])
def test_errors_of_messages_are_anthropics_without_v1_and_with_two(
    http: httpx.Client, path: str
) -> None:
    """The envelope follows the handler, and Anthropic's clients read no other."""
    answer = http.post(path, json={})
    assert answer.json().keys() == {"type", "error", "request_id"}
    assert answer.headers["request-id"] == answer.json()["request_id"]


def test_the_root_says_where_the_api_is(http: httpx.Client) -> None:
    """``GET /`` is a 200 in JSON whose paths answer."""
    answer = http.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    said = answer.json()
    assert said["server"] == "machd"
    assert http.get(said["base_url"] + "/models").status_code == 200
    assert http.get(said["openapi"]).status_code == 200
    assert http.get(said["health"]).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/models", "/models"])
def test_head_is_get_without_the_body(daemon: RunningDaemon, path: str) -> None:
    """A probe gets the status and length of GET and not one byte more; the connection lives on."""
    length = len(httpx.get(f"{daemon.url}{path}").content)
    with RawClient(daemon.url) as client:
        client.request("HEAD", path)
        head = client.read_until(b"\r\n\r\n")
        client.request("GET", "/health")
        rest = client.read_until(b'"status"').removeprefix(head)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"content-length: %d\r\n" % length in head.lower()
    assert rest.startswith(b"HTTP/1.1 200 ")


# --- Anthropic's list of models ---------------------------------------------------------------


def test_models_have_anthropics_shape_for_its_client(daemon: RunningDaemon) -> None:
    """The official client lists and retrieves the served model, and is told about another."""
    with Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client:
        page = client.models.list(limit=5)
        assert [(one.id, one.type, one.display_name) for one in page.data] == [
            ("fake", "model", "fake")
        ]
        assert (page.has_more, page.first_id, page.last_id) == (False, "fake", "fake")
        assert [one.id for one in client.models.list()] == ["fake"]
        model = client.models.retrieve("fake")
        assert model.created_at.tzinfo is not None
        assert model.created_at.timestamp() == 0
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("~other")
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": caught.value.body["error"]["message"]},  # type: ignore[index]
        "request_id": caught.value.request_id,
    }


def test_models_keep_openais_shape_without_the_header(http: httpx.Client) -> None:
    """The header alone decides, on both paths."""
    for path in ("/v1/models", "/models"):
        assert http.get(path).json()["object"] == "list"
        assert http.get(path, headers=_VERSION).json()["has_more"] is False
        assert http.get(f"{path}/fake").json()["object"] == "model"
        assert http.get(f"{path}/fake", headers=_VERSION).json()["type"] == "model"
    chatted = http.post("/v1/chat/completions", json={}, headers=_VERSION)
    assert "type" not in chatted.json()


# --- vLLM's and llama.cpp's -------------------------------------------------------------------


def test_version_is_machds(http: httpx.Client) -> None:
    """VLLM's shape, with the version that the capabilities tell."""
    version = http.get("/v1/capabilities").json()["versions"]["machd"]
    assert http.get("/version").json() == {"version": version}


def test_properties_are_those_of_the_model(http: httpx.Client) -> None:
    """llama.cpp's shape: context, slots, defaults; the model's name stands for its path."""
    properties = http.get("/props").json()
    capabilities = http.get("/v1/capabilities").json()
    settings = properties["default_generation_settings"]
    assert settings["n_ctx"] == capabilities["model"]["context_tokens"]
    assert settings["params"]["temperature"] == 1.0
    assert settings["params"]["n_predict"] == 2048
    assert properties["total_slots"] == capabilities["max_b"]
    assert properties["model_path"] == properties["model_alias"] == "fake"
    assert properties["modalities"] == {"vision": False, "audio": False}
    assert "chat_template" not in properties, "the fake engine renders chats by code"


def test_slots_are_at_work_while_sequences_run() -> None:
    """As many as run are shown as processing, without a word of the prompt; then none."""
    gate = StepGate(at_decode)
    flags = {"continuous_batching.enabled": True, "continuous_batching.max_b": 3}
    with (
        RunningDaemon(lambda: FakeEngine(before_step=gate), flags) as daemon,
        gate,
        httpx.Client(base_url=daemon.url) as http,
        RawClient(daemon.url) as client,
    ):
        asked = f"{daemon.url}/slots?fail_on_no_slot=1"
        client.post_json("/v1/completions", valid_body("/v1/completions", prompt="xyzzy"))
        gate.wait_until_held()
        slots = http.get("/slots")
        assert [one["is_processing"] for one in slots.json()] == [True, False, False]
        assert [one["id"] for one in slots.json()] == [0, 1, 2]
        assert "xyzzy" not in slots.text
        assert httpx.get(asked).status_code == 200
        gate.open()
        assert client.read_answer().status == 200
        assert not any(one["is_processing"] for one in http.get("/slots").json())


def test_slots_fail_on_request_when_all_are_at_work() -> None:
    """A balancer that asks for it gets 503, which counts as no rejected generation."""
    gate = StepGate(at_decode)
    with (
        RunningDaemon(lambda: FakeEngine(before_step=gate)) as daemon,
        gate,
        RawClient(daemon.url) as client,
    ):
        client.post_json("/v1/completions", valid_body("/v1/completions"))
        gate.wait_until_held()
        answer = httpx.get(f"{daemon.url}/slots", params={"fail_on_no_slot": 1})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        assert int(answer.headers["retry-after"]) >= 1
        assert httpx.get(f"{daemon.url}/slots").status_code == 200
        assert scrape(daemon.url, "machd_rejections_total") == 0
