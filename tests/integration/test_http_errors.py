"""Every way to be refused or to fail, in OpenAI's envelope."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

import httpx
import pytest
from litestar import Litestar
from openai import APIError, InternalServerError, OpenAI
from structlog.testing import capture_logs
from support.clients.raw_client import RawClient
from support.clocks.manual_clock import ManualClock
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, scrape
from support.engines.dialogue import chat, completion, sse_data, sse_text, told
from support.engines.fake_engine import FakeEngine, FakeFaults
from support.engines.step_gate import StepGate, at_decode, at_prefill
from support.every_run import sampled

from machd.capabilities.versions import installed_versions
from machd.clock import SystemClock
from machd.dialects.app import create_app
from machd.dialects.endpoints import PUBLIC_ENDPOINTS, PUBLIC_ROUTES
from machd.errors import EngineFaultError, MachdError, ModelFormatError, SettingsError
from machd.generations.response_store import ResponseStore
from machd.http.authentication import ApiKeys
from machd.http.context import ServerContext
from machd.http.gate import Gate, OpenRequests
from machd.settings.model import ConsoleSettings, Settings
from machd.telemetry.metrics import Metrics

_CHAT = "/v1/chat/completions"
_CANARY = "xyzzy-canary"
_KEY = "k-0123456789abcdef"
_OTHER_KEY = "k-fedcba9876543210"
_TELLTALE = re.compile(
    rf"{_CANARY}|Traceback|File \"|\.py\b|/(?:home|root|work|tmp|usr)/|0x[0-9a-f]{{6}}|site-packages"
)
_PATHS = sorted({endpoint.path.replace("{id}", "fake") for endpoint in PUBLIC_ROUTES})
_UNKNOWN_PATHS = [
    "/v1",
    "/v1/v1/models",
    "/nowhere",
    "/v1/chat/completions/x/y",
    "/admin/status",
    "/metrics/x",
    "/api",
    "/api/delete",
    "/api/push",
    "/api/chat/x",
]


class _Answer(Protocol):
    """The common part of httpx and the raw client."""

    def json(self) -> Any: ...


@pytest.fixture(autouse=True)
def _no_rendered_logs() -> Iterator[None]:
    """Tracebacks of the planted faults are kept, not drawn, which would take longer than the fault."""
    with capture_logs():
        yield


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """One daemon for the refusals that need no special settings."""
    with RunningDaemon(lambda: FakeEngine(told), {"limits.max_body_bytes": 4096}) as running:
        yield running


@pytest.fixture(scope="module")
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    """A client of that daemon."""
    with httpx.Client(base_url=daemon.url) as client:
        yield client


def _check(answer: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    """Assert the status and the envelope; returns the message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    return _check_envelope(answer, code, param)


def _check_envelope(answer: _Answer, code: str, param: str | None = None) -> str:
    """Assert OpenAI's envelope, or Anthropic's, or Ollama's, which have neither code nor param."""
    error = answer.json()["error"]
    if isinstance(error, str):
        assert answer.json().keys() == {"error"}
        error = {"type": "text", "message": error}
    elif "type" in answer.json():
        assert answer.json().keys() == {"type", "error", "request_id"}
        assert answer.json()["type"] == "error"
        assert error.keys() == {"type", "message"}
    else:
        # System One's clients read the message a second time, where they look for it.
        assert answer.json().get("detail", error["message"]) == error["message"]
        assert answer.json().keys() - {"detail"} == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["code"], error["param"]) == (code, param)
    assert error["type"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert not _TELLTALE.search(error["message"]), error["message"]
    return error["message"]


def _is_served(url: str) -> bool:
    answer = httpx.post(f"{url}{_CHAT}", json=chat("say ok"))
    return bool(answer.status_code == 200 and "ok" in answer.text)


# --- 400 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_told_both_numbers(http: httpx.Client, stream: bool) -> None:  # noqa: FBT001
    """The refusal comes before any stream starts and names the context and what was asked."""
    with RunningDaemon(lambda: FakeEngine(told, context_tokens=100)) as small:
        answer = httpx.post(f"{small.url}{_CHAT}", json=chat("x" * 200, stream=stream))
        message = _check(answer, 400, "context_length_exceeded", "messages")
        assert {"100", str(len("user: \nassistant: ") + 200)} <= set(re.findall(r"\d+", message))
        body = chat("x", stream=stream, max_tokens=100)
        assert httpx.post(f"{small.url}{_CHAT}", json=body).status_code == 200
    refusing = {"limits.max_tokens_policy": "refuse"}
    with RunningDaemon(lambda: FakeEngine(told, context_tokens=100), refusing) as small:
        answer = httpx.post(f"{small.url}{_CHAT}", json=body)
        message = _check(answer, 400, "context_length_exceeded", "max_tokens")
        assert {"100", str(len("user: x\nassistant: ") + 100)} <= set(re.findall(r"\d+", message))
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": _CANARY}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 9}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": _CANARY, "content": _CANARY}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": {_CANARY: 1}}]}, "messages[0].content"),
        ({"logit_bias": {"257": 1}}, "logit_bias"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"stop": [_CANARY, 1]}, "stop[1]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": 7}}, "stream_options.include_usage"),
        ({"user": [_CANARY]}, "user"),
        ({"stream": _CANARY}, "stream"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ],
)
def test_bad_values_name_their_field(
    http: httpx.Client, fields: dict[str, object], param: str
) -> None:
    """A value out of range or of the wrong type is a 400 about that field, quoting nothing."""
    _check(http.post(_CHAT, json=chat(_CANARY, **fields)), 400, "invalid_request", param)


@pytest.mark.parametrize("field", ["documents", "samplers", "audio", "chat_template"])
def test_unsupported_fields_are_refused_by_name(http: httpx.Client, field: str) -> None:
    """A field that would change the answer is a 400 of its own code, never ignored."""
    answer = http.post(_CHAT, json={**chat(), field: {_CANARY: 1}})
    _check(answer, 400, "unsupported_parameter", field)


@pytest.mark.parametrize(
    "path", [_CHAT, "/v1/completions", "/api/chat", "/tokenize", "/detokenize"]
)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"' + _CANARY.encode(), b"\xff\xfe"])
def test_bodies_that_are_no_object_are_refused(http: httpx.Client, path: str, body: bytes) -> None:
    """On every endpoint that takes a body, bytes that are no JSON object are a 400."""
    answer = http.post(path, content=body, headers={"Content-Type": "application/json"})
    _check(answer, 400, "invalid_request")


# --- 404, 405 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", _UNKNOWN_PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_unknown_paths(http: httpx.Client, method: str, path: str) -> None:
    """An unknown path is a 404 in the envelope, for every method."""
    _check(http.request(method, path), 404, "not_found")


@pytest.mark.parametrize(
    "path",
    [
        _CHAT,
        "/v1/completions",
        "/api/chat",
        "/api/generate",
        "/api/show",
        "/tokenize",
        "/detokenize",
    ],
)
def test_another_model_is_not_found(http: httpx.Client, path: str) -> None:
    """A name that looks like a path is a 404 that names the served model and not the asked one."""
    bodies: dict[str, dict[str, object]] = {
        _CHAT: chat(),
        "/v1/completions": completion(),
        "/api/chat": chat(),
        "/api/generate": completion(),
        "/api/show": {},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    body = {**bodies[path], "model": f"../{_CANARY}"}
    message = _check(http.post(path, json=body), 404, "model_not_found", "model")
    assert "fake" in message


@pytest.mark.parametrize("path", _PATHS)
def test_wrong_methods(http: httpx.Client, path: str) -> None:
    """A method that a path does not take is a 405 in the envelope."""
    own = {one.method for one in PUBLIC_ROUTES if one.path.replace("{id}", "fake") == path}
    for method in {"get", "post", "put", "patch", "delete"} - own:
        _check(http.request(method, path), 405, "method_not_allowed")


# --- 413, 415 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [_CHAT, "/v1/completions", "/api/chat", "/tokenize", "/detokenize"]
)
def test_a_body_that_says_it_is_too_long(daemon: RunningDaemon, path: str) -> None:
    """A Content-Length beyond the limit is a 413 before any of the body has come."""
    with RawClient(daemon.url) as client:
        client.request(
            "POST", path, headers={"Content-Type": "application/json", "Content-Length": "4097"}
        )
        answer = client.read_answer()
    assert answer.status == 413
    _check_envelope(answer, "body_too_large")
    assert _is_served(daemon.url)


def test_a_chunked_body_that_turns_out_too_long(daemon: RunningDaemon) -> None:
    """A body of unknown length is refused with 413 as soon as it passes the limit."""
    with RawClient(daemon.url) as client:
        client.request(
            "POST",
            _CHAT,
            headers={
                "Content-Type": "application/json",
                "Content-Length": "",
                "Transfer-Encoding": "chunked",
            },
        )
        for _ in range(5):
            client.send(b"400\r\n" + b" " * 1024 + b"\r\n")
        answer = client.read_answer()
    assert answer.status == 413
    _check_envelope(answer, "body_too_large")
    assert _is_served(daemon.url)


def test_a_body_far_beyond_the_limit_is_refused(http: httpx.Client) -> None:
    """A client that sends 8 MiB in one go still gets its 413, with and without Content-Length."""
    block = b" " * 65_536
    headers = {"Content-Type": "application/json"}
    _check(http.post(_CHAT, content=block * 128, headers=headers), 413, "body_too_large")
    chunked = (block for _ in range(128))
    _check(http.post(_CHAT, content=chunked, headers=headers), 413, "body_too_large")


def test_a_body_of_exactly_the_limit_is_taken(http: httpx.Client) -> None:
    """The limit itself is allowed."""
    body = httpx.Request("POST", "http://x", json=chat("say ok")).content
    answer = http.post(
        _CHAT, content=body.ljust(4096), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "path", [_CHAT, "/v1/completions", "/api/chat", "/tokenize", "/detokenize"]
)
@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "same-site"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "text/plain; application/json"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/jsonp"},
        {"Content-Type": "application/json", "Content-Encoding": "br"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip, gzip"},
    ],
)
def test_only_json_is_read(http: httpx.Client, path: str, headers: dict[str, str]) -> None:
    """Another type, no type from a browser, or another compression is a 415: pages cannot send JSON unasked."""
    _check(http.post(path, content=b"{}", headers=headers), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "media_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"]
)
def test_plain_json_may_be_spelled_as_clients_do(http: httpx.Client, media_type: str) -> None:
    """Parameters and case of the media type do not matter."""
    content = httpx.Request("POST", "http://x", json=chat("say ok")).content
    answer = http.post(_CHAT, content=content, headers={"Content-Type": media_type})
    assert answer.status_code == 200


# --- 421, 403 ---------------------------------------------------------------------------------

_BAD_HOSTS = [
    "evil.example",
    "evil.example:8080",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "user@localhost",
    "localhost:port",
    "localhost/x",
    "localhost?",
    "[::1",
    "localhost localhost",
]


_WALKED = sampled(["GET", "POST", "OPTIONS"], ["POST"])
"""``test_route_walk.py`` sends the same with every method in every run, and looks at the status alone."""


@pytest.mark.parametrize("path", [*_PATHS, *_UNKNOWN_PATHS])
@pytest.mark.parametrize("method", _WALKED)
def test_other_hosts_are_turned_away_everywhere(http: httpx.Client, method: str, path: str) -> None:
    """A Host that is not ours is a 421 on every path, known or not, whatever the method."""
    answer = http.request(method, path, headers={"Host": "evil.example"})
    _check(answer, 421, "host_not_allowed")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages"])
def test_host_refusal_names_the_line_of_configuration_to_write(
    http: httpx.Client, path: str
) -> None:
    """The 421 holds the line for the file and for the environment, with the host that was asked for."""
    answer = http.get(path, headers={"Host": "LLM.example.org:8443"})
    message = _check(answer, 421, "host_not_allowed")
    assert '[http] allowed_hosts = ["llm.example.org"] in the configuration file' in message
    assert "LME_HTTP_ALLOWED_HOSTS=llm.example.org;" in message


@pytest.mark.parametrize(
    "host",
    [
        f"{_CANARY}/x",
        f"user@{_CANARY}.example",
        f"{_CANARY}.example:port",
        f"{_CANARY} x",
        f'{_CANARY}"]',
        f"{_CANARY}\xe4",
        _CANARY + "x" * 253,
    ],
)
def test_host_refusal_repeats_no_malformed_host(daemon: RunningDaemon, host: str) -> None:
    """A Host that is no host name is not repeated: a placeholder stands in the line."""
    with RawClient(daemon.url) as client:
        client.request("GET", "/v1/models", headers={"Host": host})
        head = client.read_until(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 400 "):  # no header of HTTP at all
            client.read_to_end()
        else:
            assert '["HOST"]' in _check_envelope(client.read_answer(), "host_not_allowed")
    assert _CANARY.encode() not in client.received


@pytest.mark.parametrize("host", _BAD_HOSTS)
def test_hosts_that_are_not_ours(daemon: RunningDaemon, host: str) -> None:
    """No way to spell a foreign or malformed host gets through."""
    with RawClient(daemon.url) as client:
        client.request("GET", "/v1/models", headers={"Host": host})
        answer = client.read_answer()
    assert answer.status in (400, 421)
    assert b"fake" not in answer.body


def test_a_request_without_a_host_is_turned_away(daemon: RunningDaemon) -> None:
    """HTTP/1.0 lets a client leave the Host out; that is no host of ours."""
    with RawClient(daemon.url) as client:
        client.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert client.read_answer().status == 421


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.9.9.9:80", "[::1]:8080", "a.localhost"]
)
def test_loopback_hosts_are_ours(http: httpx.Client, host: str) -> None:
    """Every name of this machine's loopback is served, with any port."""
    assert http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("path", [*_PATHS, *_UNKNOWN_PATHS])
@pytest.mark.parametrize("method", _WALKED)
def test_browser_pages_are_turned_away_everywhere(
    http: httpx.Client, method: str, path: str
) -> None:
    """An Origin that is not allowed is a 403 on every path, known or not, whatever the method."""
    answer = http.request(method, path, headers={"Origin": "https://evil.example"})
    _check(answer, 403, "origin_not_allowed")
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages"])
@pytest.mark.parametrize(
    "origin",
    ["https://chat.example.org", "http://localhost:3000", "http://[::1]:5173", "app://obsidian.md"],
)
def test_origin_refusal_names_the_line_of_configuration_to_write(
    http: httpx.Client, path: str, origin: str
) -> None:
    """The 403 holds a line that, written into the configuration, lets the page in."""
    message = _check(http.get(path, headers={"Origin": origin}), 403, "origin_not_allowed")
    line = re.search(r"\[http\] (?P<key>[a-z_]+) = (?P<value>\S+)", message)
    assert line is not None
    assert f"LME_HTTP_ALLOWED_ORIGINS={origin};" in message
    with RunningDaemon(flags={f"http.{line['key']}": json.loads(line["value"])}) as allowed:
        answer = httpx.get(f"{allowed.url}/v1/models", headers={"Origin": origin})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "origin",
    [
        f"https://{_CANARY}/path",
        f'https://{_CANARY}"]',
        f"https://{_CANARY},x",
        f"https://user@{_CANARY}",
        f"https://{_CANARY}:port",
        f"https://{_CANARY}\xe4",
        f"{_CANARY}",
        f"https://{_CANARY}" + "x" * 253,
        f"{_CANARY.replace('-', '')}{'x' * 32}://host",
    ],
)
def test_origin_refusal_repeats_no_malformed_origin(daemon: RunningDaemon, origin: str) -> None:
    """An Origin that is none is not repeated: a placeholder stands in the line."""
    with RawClient(daemon.url) as client:
        client.request("GET", "/v1/models", headers={"Origin": origin})
        message = _check_envelope(client.read_answer(), "origin_not_allowed")
    assert '["https://HOST"]' in message
    assert "xyzzy" not in message


@pytest.mark.parametrize("origin", ["null", "http://localhost:3000", "http://127.0.0.1", ""])
def test_no_origin_is_allowed_by_default(http: httpx.Client, origin: str) -> None:
    """Not even a page of this machine may call unless it is configured."""
    answer = http.get("/v1/models", headers={"Origin": origin})
    _check(answer, 403, "origin_not_allowed")


def test_configured_hosts_and_origins_are_let_through() -> None:
    """``http.allowed_hosts`` and ``http.allowed_origins`` open exactly what they name."""
    flags = {
        "http.allowed_hosts": ["llm.example.org"],
        "http.allowed_origins": ["https://chat.example.org"],
    }
    with RunningDaemon(flags=flags) as daemon, httpx.Client(base_url=daemon.url) as client:
        for host in ("llm.example.org", "LLM.example.org:8443"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200
        other = {"Host": "x.llm.example.org"}
        _check(client.get("/v1/models", headers=other), 421, "host_not_allowed")
        good = {"Origin": "https://chat.example.org"}
        assert client.get("/v1/models", headers=good).status_code == 200
        for origin in ("http://chat.example.org", "https://chat.example.org:444"):
            answer = client.get("/v1/models", headers={"Origin": origin})
            _check(answer, 403, "origin_not_allowed")


# --- 401 --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a daemon that requires one of two keys."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# keys\n\nalice:{_KEY}\nbob:{_OTHER_KEY}\n")
    with (
        RunningDaemon(lambda: FakeEngine(told), {"auth.api_keys_file": str(path)}) as daemon,
        httpx.Client(base_url=daemon.url) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {_KEY}"},
        {"Authorization": f"bearer {_KEY}"},
        {"X-Api-Key": _KEY},
        {"X-Api-Key": _OTHER_KEY},
        {"Authorization": f"Bearer {_KEY}", "X-Api-Key": _KEY},
    ],
)
def test_good_keys_open_the_door(locked: httpx.Client, headers: dict[str, str]) -> None:
    """Either header form carries a key; the same key in both is one key."""
    assert locked.post(_CHAT, json=chat("say ok"), headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": _KEY},
        {"Authorization": f"Basic {_KEY}"},
        {"Authorization": f"Bearer  {_KEY}"},
        {"Authorization": f"Bearer {_KEY}x"},
        {"Authorization": f"Bearer {_KEY[:-1]}"},
        {"Authorization": f"Bearer {_KEY.upper()}"},
        {"Authorization": "Bearer alice"},
        {"Authorization": f"Bearer alice:{_KEY}"},
        {"X-Api-Key": ""},
        {"X-Api-Key": _CANARY},
        {"Authorization": f"Bearer {_KEY}", "X-Api-Key": _OTHER_KEY},
        {"Authorization": f"Bearer {_KEY}", "X-Api-Key": _CANARY},
    ],
)
def test_bad_keys_are_refused(locked: httpx.Client, headers: dict[str, str]) -> None:
    """No key, an unknown one, a wrong form, or two that differ: 401, quoting nothing."""
    answer = locked.post(_CHAT, json=chat("say ok"), headers=headers)
    _check(answer, 401, "invalid_api_key")
    assert answer.json()["error"]["type"] == "authentication_error"
    assert "k-0123" not in answer.text


def test_a_key_that_is_not_ascii_is_refused(locked: httpx.Client) -> None:
    """Bytes beyond ASCII in a key are a wrong key, not a failure."""
    answer = locked.get("/v1/models", headers={b"X-Api-Key": ("é" * 20).encode()})
    _check(answer, 401, "invalid_api_key")


def _registered_routes() -> set[tuple[str, str]]:
    """Every (method, path) that the application has, as the framework knows them."""
    context = ServerContext(
        clock=SystemClock(),
        settings=Settings(console=ConsoleSettings(public=False)),  # the page is no route
        versions=installed_versions(),
        responses=ResponseStore(max_responses=0, max_bytes=0),
        models=cast("Any", None),
        services={},
    )
    gate = create_app(
        context,
        Metrics(),
        ApiKeys.none(),
        open_requests=OpenRequests(),
        max_connections=100,
    )
    assert isinstance(gate, Gate)
    app = gate._app
    assert isinstance(app, Litestar)
    return {
        (method, re.sub(r"\{\w+:\w+\}", "fake", route.path))
        for route in app.routes
        for method in getattr(route, "methods", ())
    }


def test_every_registered_route_is_in_the_table() -> None:
    """The table that documents the endpoints misses none that the application has."""
    described = {(one.method.upper(), one.path.replace("{id}", "fake")) for one in PUBLIC_ROUTES}
    # HEAD is GET without the body, and stands in no table.
    registered = {route for route in _registered_routes() if route[0] not in ("OPTIONS", "HEAD")}
    assert registered == described


def test_without_a_key_only_health_answers(locked: httpx.Client) -> None:
    """Without a key every registered route refuses, for its own methods and all others."""
    open_paths = {"/", "/health", "/health/live", "/health/ready", "/lmstudio-greeting"}
    routes = _registered_routes()
    for method, path in sorted(routes):
        answer = locked.request(method, path)
        if path in open_paths and method in ("GET", "HEAD"):
            assert answer.status_code == 200, (method, path)
        else:
            assert answer.status_code == 401, (method, path)
    for path in sorted({path for _, path in routes}):
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE"):
            if (method, path) not in routes:
                assert locked.request(method, path).status_code in (401, 405), (method, path)


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/V1/models",
        "/v1/./models",
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/%76%31/models",
        "/v1%2fmodels",
        "/v1/models?x=/health",
        "/v1/models;/health",
        "/v1/models%00/health",
        "http://localhost/v1/models",
        "http://localhost/health/../v1/models",
    ],
)
def test_no_spelling_of_a_path_avoids_the_key(locked: httpx.Client, target: str) -> None:
    """However a request line spells a path, what needs a key is not given without one."""
    with RawClient(str(locked.base_url)) as client:
        client.request("GET", target)
        answer = client.read_answer()
    assert answer.status in (400, 401, 404)
    assert b'"data"' not in answer.body


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "holds no key"),
        ("alice\n", "line 1"),
        ("alice:short\n", "line 1"),
        (f":{_KEY}\n", "line 1"),
        (f"a:{_KEY}\na:{_OTHER_KEY}\n", "twice"),
    ],
)
def test_a_bad_key_file_stops_the_start(tmp_path: Path, content: str, problem: str) -> None:
    """A key file that is wrong in any way is an error at start-up that quotes no key."""
    path = tmp_path / "keys"
    path.write_text(content)
    with (
        pytest.raises(SettingsError, match=problem) as caught,
        RunningDaemon(flags={"auth.api_keys_file": str(path)}),
    ):
        pass
    assert "k-0123" not in str(caught.value)


# --- 429, 503, 504 ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_says_when_to_come_back(stream: bool) -> None:  # noqa: FBT001
    """Beyond ``limits.max_queue`` a request gets 429 with Retry-After; those before it are served."""
    gate = StepGate()
    flags = {"limits.max_queue": 1}
    with (
        RunningDaemon(
            lambda: FakeEngine(told, before_step=gate, context_tokens=100_000), flags
        ) as daemon,
        RawClient(daemon.url) as running,
        RawClient(daemon.url) as waiting,
        RawClient(daemon.url) as refused,
        gate,
    ):
        running.post_json(_CHAT, chat("hi", max_tokens=50_000, stream=True))
        gate.wait_until_held()
        waiting.post_json(_CHAT, chat("say waited"))
        gate.step_until(
            lambda: scrape(daemon.url, "machd_requests_waiting") == 1, "one request waits"
        )
        refused.post_json(_CHAT, chat(_CANARY, stream=stream))
        gate.step_until(lambda: refused.is_answered, "the next one is refused")
        answer = refused.read_answer()
        assert answer.status == 429
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        _check_envelope(answer, "queue_full")
        assert scrape(daemon.url, "machd_rejections_total", reason="queue_full") == 1
        running.reset()
        gate.open()
        assert b"waited" in waiting.read_answer().body


def test_a_prompt_too_long_for_the_queue_is_refused() -> None:
    """``limits.max_queue_tokens`` bounds what waits; an idle daemon takes the same prompt."""
    gate = StepGate()
    flags = {"limits.max_queue_tokens": 100}
    with (
        RunningDaemon(
            lambda: FakeEngine(told, before_step=gate, context_tokens=100_000), flags
        ) as daemon,
        RawClient(daemon.url) as running,
        RawClient(daemon.url) as refused,
        gate,
    ):
        running.post_json(_CHAT, chat("x" * 200, max_tokens=50_000, stream=True))
        gate.wait_until_held()
        refused.post_json(_CHAT, chat("x" * 200))
        gate.step_until(lambda: refused.is_answered, "the long prompt is refused")
        assert refused.read_answer().status == 429
        running.reset()


def test_waiting_request_is_503_when_its_queue_timeout_has_passed() -> None:
    """After ``limits.queue_timeout_s`` a waiting request gets 503 with Retry-After."""
    gate, clock = StepGate(), ManualClock()
    flags = {"limits.queue_timeout_s": 900}
    engine = FakeEngine(told, before_step=gate, context_tokens=1_000_000)
    with (
        RunningDaemon(lambda: engine, flags, clock=clock) as daemon,
        RawClient(daemon.url) as running,
        RawClient(daemon.url) as waiting,
        gate,
    ):
        running.post_json(_CHAT, chat("hi", max_tokens=900_000, stream=True))
        gate.wait_until_held()
        waiting.post_json(_CHAT, chat(_CANARY, stream=True))
        gate.step_until(lambda: scrape(daemon.url, "machd_requests_waiting") == 1, "it waits")
        assert not waiting.is_answered
        clock.advance(901)
        gate.step_until(lambda: waiting.is_answered, "the waiting request is turned away")
        answer = waiting.read_answer()
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
        _check_envelope(answer, "queue_timeout")
        running.reset()


def test_running_request_is_504_when_its_request_timeout_has_passed() -> None:
    """After ``limits.request_timeout_s`` a whole answer is 504, and a stream ends with the error."""
    gate, clock = StepGate(), ManualClock()
    flags = {"limits.request_timeout_s": 3600}
    engine = FakeEngine(told, before_step=gate, context_tokens=1_000_000)
    with RunningDaemon(lambda: engine, flags, clock=clock) as daemon, gate:
        for stream in (False, True):
            with RawClient(daemon.url) as client:
                client.post_json(_CHAT, chat(_CANARY, max_tokens=900_000, stream=stream))
                gate.wait_until_held()
                if stream:
                    gate.step_until(lambda client=client: client.is_answered, "it begins")  # type: ignore[misc]
                assert client.is_answered is stream
                clock.advance(3601)
                if stream:
                    gate.step_until(
                        lambda client=client: _drained(client).endswith(b"0\r\n\r\n"),  # type: ignore[misc]
                        "the stream ends",
                    )
                else:
                    gate.step_until(lambda client=client: client.is_answered, "it is answered")  # type: ignore[misc]
                answer = client.read_answer()
            if stream:
                assert answer.status == 200
                assert sse_data(answer.body)[-1]["error"]["code"] == "request_timeout"
            else:
                assert answer.status == 504
                _check_envelope(answer, "request_timeout")
        wait_until(
            lambda: scrape(daemon.url, "machd_aborts_total", reason="request_timeout") == 2,
            "both are counted",
        )


def _drained(client: RawClient) -> bytes:
    """Read what has come, without waiting; returns everything so far."""
    while client.is_answered:
        client.receive()
    return client.received


def test_a_loading_daemon_says_so_on_every_endpoint() -> None:
    """While the model loads, all that needs it is 503 with Retry-After, as the table says it can be."""
    may_load = threading.Event()

    def load() -> FakeEngine:
        assert may_load.wait(CEILING_S)
        return FakeEngine()

    bodies = {
        _CHAT: chat(),
        "/v1/completions": completion(),
        "/v1/embeddings": {"model": "fake", "input": "a"},
        "/embedding": {"model": "fake", "content": "a"},
        "/embed": {"model": "fake", "inputs": "a"},
        "/api/embed": {"model": "fake", "input": "a"},
        "/api/embeddings": {"model": "fake", "prompt": "a"},
        "/v1/rerank": {"model": "fake", "query": "a", "documents": ["b"]},
        "/v2/rerank": {"model": "fake", "query": "a", "documents": ["b"]},
        "/v1/score": {"model": "fake", "text_1": "a", "text_2": "b"},
        "/v1/classify": {"model": "fake", "input": "a"},
        "/predict": {"model": "fake", "inputs": "a"},
        "/v1/systemone": {"state": "a", "questions": {"b": {"type": "noul", "instructions": "c"}}},
        "/v1/responses": {"model": "fake", "input": "a"},
        "/v1/messages": chat(max_tokens=1),
        "/v1/messages/count_tokens": chat(),
        "/infill": {"model": "fake", "input_prefix": "a", "input_suffix": "b"},
        "/api/chat": chat(),
        "/api/generate": completion(),
        "/api/show": {"model": "fake"},
        "/models/load": {"model": "fake"},
        "/models/unload": {"model": "fake"},
        "/api/v1/models/load": {"model": "fake"},
        "/api/v1/models/unload": {"instance_id": "fake"},
        "/api/pull": {"model": "org/name"},
        "/v1/load_lora_adapter": {"lora_name": "a"},
        "/v1/unload_lora_adapter": {"lora_name": "a"},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }
    needs_no_model = {
        "/",
        "/version",
        "/api/version",
        "/health",
        "/health/live",
        "/lmstudio-greeting",
        "/lora-adapters",  # none, of a daemon without any
        "/metrics",
        "/openapi.json",
    }
    with RunningDaemon(load, wait_until_ready=False) as daemon:
        answers: dict[str, httpx.Response] = {}
        try:
            transport = httpx.HTTPTransport(retries=5)
            with httpx.Client(base_url=daemon.url, transport=transport) as client:
                for endpoint in PUBLIC_ENDPOINTS:
                    answers[endpoint.name] = client.request(
                        endpoint.method,
                        endpoint.path.replace("{id}", "fake"),
                        json=bodies.get(endpoint.path),
                    )
        finally:
            may_load.set()
        wait_until(
            lambda: httpx.get(f"{daemon.url}/health/ready").status_code == 200, "it is loaded"
        )
    for endpoint in PUBLIC_ENDPOINTS:
        answer = answers[endpoint.name]
        if endpoint.name == "set_lora_adapters":
            _check(answer, 400, "unsupported_parameter")  # whatever is loaded
        elif endpoint.path in needs_no_model:
            assert answer.status_code == 200, endpoint.path
        elif endpoint.path in {"/api/pull", "/models/sse"}:
            assert answer.status_code == 404  # one model is all that this daemon serves
        elif endpoint.path != "/health/ready":
            _check(answer, 503, "not_ready")
            assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("endpoint", PUBLIC_ENDPOINTS, ids=lambda one: one.name)
def test_the_table_says_what_a_loading_daemon_answers(endpoint: Any) -> None:
    """An endpoint that needs the model lists 503 among its answers."""
    if endpoint.path not in {"/", "/version", "/metrics", "/openapi.json", "/lmstudio-greeting"}:
        assert 503 in {answer.status for answer in endpoint.answers}


# --- faults -----------------------------------------------------------------------------------


def _fault() -> Exception:
    return ValueError(f"{_CANARY} at /home/someone/model.py")


@pytest.mark.parametrize(("position", "stream"), [(0, False), (3, False), (0, True)])
def test_a_row_fault_is_answered_in_the_envelope(position: int, stream: bool) -> None:  # noqa: FBT001
    """A row that fails before anything was sent is a 500; the next request is served."""
    faults = FakeFaults(row_errors={(0, position): _fault()})
    with RunningDaemon(lambda: FakeEngine(told, faults=faults)) as daemon:
        body = chat("say long text", stream=stream)
        _check(httpx.post(f"{daemon.url}{_CHAT}", json=body), 500, "row_fault")
        faults.row_errors.clear()
        assert _is_served(daemon.url)
        assert scrape(daemon.url, "machd_faults_total", scope="row") == 1
        labels = {"endpoint": "chat_completions", "finish_reason": "error"}
        assert scrape(daemon.url, "machd_requests_total", **labels) == 1


def test_a_fault_after_the_first_comment_is_an_event() -> None:
    """A prefill so long that comments have begun to flow can only fail inside the stream."""
    gate = StepGate(at_prefill)
    faults = FakeFaults(row_errors={(0, 0): _fault()})
    flags = {"streaming.keepalive_s": 0.02}
    with (
        RunningDaemon(lambda: FakeEngine(told, faults=faults, before_step=gate), flags) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        client.post_json(_CHAT, chat("say abc", stream=True))
        gate.wait_until_held()
        client.read_until(b": prefill 0/")
        gate.open()
        answer = client.read_answer()
    assert answer.status == 200
    assert sse_data(answer.body)[-1]["error"]["code"] == "row_fault"


@pytest.mark.parametrize("path", [_CHAT, "/v1/completions"])
def test_a_row_fault_mid_stream_is_an_event(path: str) -> None:
    """A stream that has begun ends with an error event and ``[DONE]``; what came before stays."""
    gate = StepGate(at_decode)
    faults = FakeFaults(row_errors={(0, 3): _fault()})
    with (
        RunningDaemon(lambda: FakeEngine(told, faults=faults, before_step=gate)) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        body = chat("say abcdef") if path == _CHAT else completion("say abcdef")
        client.post_json(path, {**body, "stream": True})
        for letter in b"abc":
            gate.wait_until_held()
            client.read_until(b'"%c"' % letter)
            gate.let()
        answer = client.read_answer()
        events = sse_data(answer.body)
        assert sse_text(answer.body) == "abc"
        assert events[-1].keys() == {"error"}
        assert events[-1]["error"]["code"] == "row_fault"
        assert not _TELLTALE.search(answer.body.decode())
        gate.open()
        faults.row_errors.clear()
        assert _is_served(daemon.url)


def test_text_before_a_fault_is_not_lost() -> None:
    """Text from before the fault reaches the client, also text that waited to be merged."""
    gate = StepGate(at_decode)
    faults = FakeFaults(row_errors={(0, 5): _fault()})
    with (
        RunningDaemon(lambda: FakeEngine(told, faults=faults, before_step=gate)) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        client.post_json(_CHAT, chat("say abcdefgh", stream=True, stream_interval=1000))
        gate.wait_until_held()
        client.read_until(b'"content":"a"')
        gate.open()
        answer = client.read_answer()
        assert sse_data(answer.body)[-1]["error"]["code"] == "row_fault"
        assert sse_text(answer.body) == "abcde"


def test_openais_client_raises_on_an_error_event() -> None:
    """OpenAI's client turns the event into an APIError; a whole answer into InternalServerError."""
    faults = FakeFaults(row_errors={(0, 3): _fault()})
    gate = StepGate(at_decode)
    with (
        RunningDaemon(lambda: FakeEngine(told, faults=faults, before_step=gate)) as daemon,
        gate,
        OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client,
        # The head of a stream comes with its first token, so the fault finds the stream begun.
        client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "say abcdef"}], stream=True
        ) as stream,
    ):
        gate.open()
        with pytest.raises(APIError) as caught:
            list(stream)
        assert caught.value.code == "row_fault"
        with pytest.raises(InternalServerError) as whole:
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "say abcdef"}]
            )
        assert whole.value.code == "row_fault"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [0, 2, 5])
def test_an_engine_fault_costs_no_answer(step: int, stream: bool) -> None:  # noqa: FBT001
    """The request whose step raised is resumed: its client gets all of its text, and reads of no fault."""
    faults = FakeFaults(step_errors={step: _fault()})
    with RunningDaemon(lambda: FakeEngine(told, faults=faults)) as daemon:
        answer = httpx.post(f"{daemon.url}{_CHAT}", json=chat("say long text", stream=stream))
        assert answer.status_code == 200
        whole = None if stream else answer.json()["choices"][0]["message"]["content"]
        assert (whole or sse_text(answer.content)) == "long text"
        assert scrape(daemon.url, "machd_faults_total", scope="engine") == 1
        assert scrape(daemon.url, "machd_requests_total", finish_reason="error") == 0


@pytest.mark.parametrize(("step", "stream"), [(0, False), (2, False), (0, True)])
def test_an_engine_fault_that_comes_again_is_answered(step: int, stream: bool) -> None:  # noqa: FBT001
    """A request that fails alone as well is a 503; the next request is served."""
    faults = FakeFaults(step_errors={step: _fault(), step + 1: _fault()})
    with RunningDaemon(lambda: FakeEngine(told, faults=faults)) as daemon:
        answer = httpx.post(f"{daemon.url}{_CHAT}", json=chat("say long text", stream=stream))
        _check(answer, 503, "engine_fault")
        assert _is_served(daemon.url)
        assert scrape(daemon.url, "machd_faults_total", scope="engine") == 2
        assert httpx.get(f"{daemon.url}/health/live").status_code == 200


def test_an_engine_fault_mid_stream_is_an_event() -> None:
    """A running stream that fails alone as well ends with the event; a request that waits is served."""
    gate = StepGate(at_decode)
    faults = FakeFaults(step_errors={2: _fault(), 3: _fault()})
    with (
        RunningDaemon(lambda: FakeEngine(told, faults=faults, before_step=gate)) as daemon,
        RawClient(daemon.url) as running,
        RawClient(daemon.url) as waiting,
        gate,
    ):
        running.post_json(_CHAT, chat("say abcdef", stream=True))
        gate.wait_until_held()
        running.read_until(b'"content":"a"')  # unread, it would come in one event with b
        waiting.post_json(_CHAT, chat("say waited"))
        gate.let()
        running.read_until(b'"content":"b"')
        gate.wait_until_held()
        gate.open()
        answer = running.read_answer()
        assert sse_data(answer.body)[-1]["error"]["code"] == "engine_fault"
        assert not _TELLTALE.search(answer.body.decode())
        assert b"waited" in waiting.read_answer().body
        assert _is_served(daemon.url)


def test_two_requests_that_fail_are_survived_again_and_again() -> None:
    """Only faults in a row count: a good step in between starts the count afresh."""
    faults = FakeFaults(
        step_errors={step: _fault() for step in (*range(4), *range(7, 11), *range(14, 18))}
    )
    with RunningDaemon(lambda: FakeEngine(told, faults=faults)) as daemon:
        for _ in range(3):
            for _ in range(2):
                answer = httpx.post(f"{daemon.url}{_CHAT}", json=chat("say ok"))
                _check(answer, 503, "engine_fault")
            assert _is_served(daemon.url)  # three steps: o, k, and the end of text


_NO_TIMEOUT: dict[str, object] = {
    "limits.drain_timeout_s": 3600,
    "limits.client_stall_timeout_s": 3600,
}
"""Longer than a test waits: a daemon that ends did not wait for them."""


def test_six_faults_in_a_row_end_the_daemon() -> None:
    """Three requests fail twice; the third is answered too, and then the daemon ends with the fault."""
    faults = FakeFaults(step_errors={step: _fault() for step in range(6)})
    with RunningDaemon(lambda: FakeEngine(told, faults=faults), _NO_TIMEOUT) as daemon:
        for _ in range(3):
            answer = httpx.post(f"{daemon.url}{_CHAT}", json=chat("say ok"))
            _check(answer, 503, "engine_fault")
        assert daemon.join(CEILING_S)
        assert isinstance(daemon.error, EngineFaultError)
        assert daemon.error.exit_code == 70


def test_a_reset_that_fails_ends_the_daemon() -> None:
    """An engine that cannot be reset is given up at once, and its client is answered."""
    faults = FakeFaults(step_errors={0: _fault()}, reset_error=_fault())
    with RunningDaemon(lambda: FakeEngine(told, faults=faults), _NO_TIMEOUT) as daemon:
        answer = httpx.post(f"{daemon.url}{_CHAT}", json=chat("say ok"))
        _check(answer, 503, "engine_fault")
        assert daemon.join(CEILING_S)
        assert isinstance(daemon.error, EngineFaultError)


def test_a_dead_engine_is_not_alive() -> None:
    """While the last streams end after the engine was given up, live and ready are 503."""
    steps = 5000
    faults = FakeFaults(step_errors={steps + number: _fault() for number in range(6)})
    engine = FakeEngine(told, faults=faults, context_tokens=20_000)
    with (
        RunningDaemon(lambda: engine, _NO_TIMEOUT) as daemon,
        # This one does not read, so that the daemon still has a stream to finish.
        RawClient(daemon.url, receive_buffer_bytes=4096) as slow,
        httpx.Client(base_url=daemon.url) as client,
    ):
        body = chat("hi", stream=True, max_tokens=steps, logprobs=True, top_logprobs=20)
        slow.post_json(_CHAT, body)
        slow.read_until(b"data: ")
        wait_until(lambda: is_idle(daemon.url), "the engine has computed the slow one's stream")
        for _ in range(3):
            _check(client.post(_CHAT, json=chat("say ok")), 503, "engine_fault")
        wait_until(
            lambda: client.get("/health/live").status_code == 503, "the daemon says it is dead"
        )
        live = client.get("/health/live")
        ready = client.get("/health/ready")
        refused = client.post(_CHAT, json=chat("say ok"))
        slow.reset()
        assert live.status_code == ready.status_code == 503
        assert live.json() == {
            "status": "unavailable",
            "state": "failed",
            "reason": "the engine has stopped",
        }
        _check(refused, 503, "engine_fault")
        assert daemon.join(CEILING_S)
        assert isinstance(daemon.error, EngineFaultError)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (MemoryError(_CANARY), EngineFaultError),
        (ModelFormatError("the weights are truncated"), ModelFormatError),
    ],
)
def test_a_model_that_does_not_load_ends_the_daemon(
    raised: Exception, expected: type[MachdError]
) -> None:
    """An expected error is what the daemon ends with; any other becomes one that quotes nothing."""

    def load() -> FakeEngine:
        raise raised

    with pytest.raises(expected) as caught, RunningDaemon(load):
        pass
    assert _CANARY not in caught.value.message
