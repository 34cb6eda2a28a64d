"""Every route and method of the public application, called without permission."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import structlog
from litestar import Litestar
from litestar.routes import HTTPRoute
from support.clients.raw_client import RawClient
from support.daemon.running_daemon import RunningDaemon
from support.engines.dialogue import chat, completion, told
from support.engines.fake_engine import FakeEngine
from support.every_run import sampled

from machd.capabilities.versions import installed_versions
from machd.clock import SystemClock
from machd.dialects.app import create_app
from machd.generations.response_store import ResponseStore
from machd.http.authentication import ApiKeys
from machd.http.context import ServerContext
from machd.http.gate import Gate, OpenRequests
from machd.settings.model import ConsoleSettings, Settings
from machd.telemetry.logs import configure_logs
from machd.telemetry.metrics import Metrics

KEY = "k-alice-0123456789abcdef"
OTHER_KEY = "k-bob-0123456789abcdef"
CANARY = "xyzzy-canary"
PUBLIC = {"/", "/health", "/health/live", "/health/ready", "/lmstudio-greeting"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW")
STRANGERS: dict[str, list[tuple[str, str]]] = {
    "no key": [],
    "a wrong bearer": [("Authorization", f"Bearer {KEY}x")],
    "a wrong x-api-key": [("X-Api-Key", CANARY)],
    "basic": [("Authorization", f"Basic {KEY}")],
    "two keys in two forms": [("Authorization", f"Bearer {KEY}"), ("X-Api-Key", OTHER_KEY)],
    "two bearers": [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER_KEY}")],
    "two x-api-keys": [("X-Api-Key", KEY), ("X-Api-Key", OTHER_KEY)],
    "a key elsewhere": [
        ("Api-Key", KEY),
        ("Cookie", f"key={KEY}"),
        ("X-Forwarded-For", "127.0.0.1"),
    ],
}
ODD_TARGETS = [
    "//v1/models",
    "///v1/models",
    "/v1//models",
    "/v1/models/",
    "/v1/models//",
    "/v1/models/.",
    "/v1/models/..",
    "/v1/models/%2e",
    "/v1/models/%2e%2e/models",
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/health%2f..%2fv1%2fmodels",
    "/health/live/../../v1/models",
    "/v1%2fmodels",
    "/v1%252fmodels",
    "/%76%31/%6d%6f%64%65%6c%73",
    "/V1/MODELS",
    "/v1/models?",
    "/v1/models?/health",
    "/v1/models?api_key=" + KEY,
    "/v1/models#/health",
    "/v1/models;/health",
    "/v1/models%00",
    "/v1/models%0d%0aX-Api-Key:%20" + KEY,
    "/v1\\models",
    "/\\v1/models",
    "http://127.0.0.1/v1/models",
    "http://127.0.0.1/health/../v1/models",
    "http://evil.example/v1/models",
    "http://evil.example/health",
    f"http://alice:{KEY}@127.0.0.1/v1/models",
    "*",
    "v1/models",
]
ODD_HOSTS = [
    "127.0.0.1/health",
    "127.0.0.1/health?",
    "localhost/?/health",
    "localhost#",
    "evil@localhost",
    "localhost@evil",
    "localhost evil",
    "localhost,evil.example",
    "localhost:8080:8080",
    "localhost:",
    "[::1",
    "::1",
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "\u0130localhost",
]


_LM_STUDIO = ("/api/v0/", "/api/v1/")
"""Paths whose errors are in OpenAI's envelope, beside Ollama's below ``/api``."""


@cache
def _routes() -> list[tuple[str, set[str]]]:
    """Every path that the application has, parameters filled in, and its methods."""
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
    return sorted(
        (re.sub(r"\{\w+:\w+\}", "fake", route.path), {str(one) for one in route.methods})
        for route in app.routes
        if isinstance(route, HTTPRoute)
    )


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two keys."""
    path = tmp_path_factory.mktemp("keys") / "api-keys"
    path.write_text(f"alice:{KEY}\nbob:{OTHER_KEY}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def locked(key_file: Path) -> Iterator[httpx.Client]:
    """A client, without a key of its own, of a daemon that asks for one."""
    flags = {"auth.api_keys_file": str(key_file)}
    with (
        RunningDaemon(lambda: FakeEngine(told), flags) as daemon,
        httpx.Client(base_url=daemon.url) as client,
    ):
        yield client


def test_the_walk_sees_the_routes() -> None:
    """A walk over nothing would prove nothing."""
    paths = {path for path, _ in _routes()}
    assert len(paths) >= 15
    assert {"/v1/chat/completions", "/v1/messages", "/metrics", *PUBLIC} <= paths
    assert {"/chat/completions", "/messages", "/models", "/infill", "/props", "/slots"} <= paths


@pytest.mark.parametrize(
    ("stranger", "walked"),
    sampled(
        [(one, walked) for one in STRANGERS for walked in ("every method", "its methods")],
        [
            ("no key", "every method"),
            *((one, "its methods") for one in STRANGERS if one != "no key"),
        ],
    ),
)
def test_strangers_get_nothing_but_health(locked: httpx.Client, stranger: str, walked: str) -> None:
    """On every route: 401 where the method exists, 405 where not, and no CORS header at all."""
    for path, methods in _routes():
        for method in METHODS if walked == "every method" else sorted(methods):
            answer = locked.request(method, path, headers=STRANGERS[stranger])
            if path in PUBLIC and method in ("GET", "HEAD"):
                assert answer.status_code == 200, (method, path)
            elif method in methods:
                assert answer.status_code == 401, (method, path, answer.status_code)
            else:
                assert answer.status_code in (401, 405), (method, path, answer.status_code)
            if answer.status_code == 401 and method != "HEAD":
                error = answer.json()["error"]
                if path.startswith("/api/") and not path.startswith(_LM_STUDIO):
                    assert "API key" in error
                else:
                    assert error["type"] == "authentication_error"
            _check_quiet(answer)


def _check_quiet(answer: httpx.Response) -> None:
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert not any(one in answer.text for one in (KEY, OTHER_KEY, CANARY))


def test_both_forms_of_the_key_open_every_route(locked: httpx.Client) -> None:
    """With a good key no route and no method answers 401 or 403, and none fails."""
    for headers in ({"Authorization": f"Bearer {KEY}"}, {"X-Api-Key": KEY}):
        for path, methods in _routes():
            for method in sorted(methods):
                status = locked.request(method, path, headers=headers).status_code
                assert status < 500, (method, path)
                assert status not in (401, 403), (method, path)


@pytest.mark.parametrize("target", ODD_TARGETS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
def test_no_spelling_of_a_path_gets_by(locked: httpx.Client, method: str, target: str) -> None:
    """However the request line is written, a stranger is not given what needs a key."""
    with RawClient(str(locked.base_url)) as client:
        client.request(method, target, headers={"Connection": "close"})
        head = client.read_until(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status in (400, 401, 404, 405, 421), (status, target)
    assert b"access-control-" not in head.lower()


@pytest.mark.parametrize("host", ODD_HOSTS)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nowhere"])
def test_no_host_gets_by(locked: httpx.Client, host: str, path: str) -> None:
    """A Host that is not plainly ours is turned away before anything else, key or not."""
    with RawClient(str(locked.base_url)) as client:
        lines = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nX-Api-Key: {KEY}\r\n\r\n"
        client.send(lines.encode())
        head = client.read_until(b"\r\n\r\n")
    assert int(head.split()[1]) in (400, 421), head


def test_two_hosts_are_none(locked: httpx.Client) -> None:
    """A second Host header cannot smuggle in a name of ours."""
    for hosts in ("Host: localhost\r\nHost: evil.example", "Host: evil.example\r\nHost: localhost"):
        with RawClient(str(locked.base_url)) as client:
            client.send(f"GET /health HTTP/1.1\r\n{hosts}\r\n\r\n".encode())
            head = client.read_until(b"\r\n\r\n")
        assert int(head.split()[1]) in (400, 421)


_FOREIGN: list[tuple[dict[str, str], int]] = [
    ({"Host": "evil.example"}, 421),
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "http://localhost"}, 403),
    ({"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}, 403),
]


@pytest.mark.parametrize(
    ("headers", "status", "walked"),
    sampled(
        [(*one, walked) for one in _FOREIGN for walked in (METHODS, ("POST", "OPTIONS"))],
        [
            *((*one, METHODS) for one in _FOREIGN[:2]),
            *((*one, ("POST", "OPTIONS")) for one in _FOREIGN[2:]),
        ],
    ),
)
def test_pages_of_elsewhere_are_turned_away_everywhere(
    locked: httpx.Client, headers: dict[str, str], status: int, walked: Sequence[str]
) -> None:
    """A foreign Host or Origin gets the same answer on every path and method, with a good key too."""
    for path in [*(path for path, _ in _routes()), "/nowhere", "/"]:
        for method in walked:
            answer = locked.request(method, path, headers={**headers, "X-Api-Key": KEY})
            assert answer.status_code == status, (method, path)
            _check_quiet(answer)


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_what_a_form_can_send_is_refused(locked: httpx.Client, media_type: str) -> None:
    """A browser sends these without asking first; no route that takes a body takes one."""
    bodies = [path for path, methods in _routes() if "POST" in methods]
    assert len(bodies) >= 7
    for path in bodies:
        headers = {"X-Api-Key": KEY, "Sec-Fetch-Site": "cross-site"}
        headers |= {"Content-Type": media_type} if media_type else {}
        answer = locked.post(path, content=json.dumps(chat("hi")).encode(), headers=headers)
        assert answer.status_code == 415, path


def _has_other_name(path: str) -> bool:
    return f"/v1{path}" in {one for one, _ in _routes()}


@pytest.mark.parametrize("is_by_every_name", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_clients_type_is_never_logged(
    key_file: Path,
    is_by_every_name: bool,  # noqa: FBT001
) -> None:
    """At level debug, over every endpoint: no header, name, text or identifier of a client's."""
    with _rendered_logs() as log:
        flags = {
            "auth.api_keys_file": str(key_file),
            "logging.level": "debug",
            "limits.max_tokens_default": 4,
        }
        with (
            RunningDaemon(lambda: FakeEngine(told), flags) as daemon,
            httpx.Client(base_url=daemon.url, headers=_canary_headers()) as client,
        ):
            statuses = [
                client.request(method, path, json=body).status_code
                for number, body in enumerate(_canary_bodies())
                for path, methods in _routes()
                for method in sorted(methods)
                # The other methods read no body, and other names of an endpoint are the same code.
                if not number
                or (method == "POST" and (is_by_every_name or not _has_other_name(path)))
            ]
            for method in METHODS:
                client.request(method, f"/{CANARY}?{CANARY}={CANARY}")
            client.post("/v1/chat/completions", content=f'{{"{CANARY}'.encode())
            client.get("/v1/models", headers={"Host": f"{CANARY}.example"})
            client.get("/v1/models", headers={"Origin": f"https://{CANARY}.example"})
            client.get("/v1/models", headers={"X-Api-Key": CANARY})
        text = log.getvalue()

    assert {200, 400, 404} <= set(statuses)
    assert text.count("request.finished") >= 4
    assert '"level": "debug"' in text
    assert CANARY not in text
    assert KEY not in text


def _canary_headers() -> dict[str, str]:
    """Headers that hold the canary wherever a client may write."""
    return {
        "X-Api-Key": KEY,
        "X-Request-Id": f"{CANARY} \t{CANARY}",
        "Traceparent": f"00-{CANARY}",
        "Tracestate": f"{CANARY}={CANARY}",
        "User-Agent": CANARY,
        "Referer": CANARY,
        "Cookie": CANARY,
        "Idempotency-Key": CANARY,
        "OpenAI-Organization": CANARY,
        "Anthropic-Version": CANARY,
        "Anthropic-Beta": CANARY,
        "X-Forwarded-For": CANARY,
        "X-Stainless-Lang": CANARY,
        CANARY: CANARY,
    }


def _canary_bodies() -> Iterator[dict[str, object]]:
    """Good and bad bodies of every dialect, each with the canary in all that a client names."""
    schema = {"type": "object", "properties": {CANARY: {"type": "string", "description": CANARY}}}
    function = {"name": CANARY, "description": CANARY, "parameters": schema}
    said = {"metadata": {CANARY: CANARY}, "user": CANARY, "max_tokens": 4}
    yield chat(f"say {CANARY}", **said)
    yield chat(
        f"say {CANARY}", **said, stream=True, tools=[{"type": "function", "function": function}]
    )
    yield chat(CANARY, **said, stop=[CANARY], safety_identifier=CANARY, prompt_cache_key=CANARY)
    yield chat(
        CANARY,
        max_tokens=4,
        response_format={"type": "json_schema", "json_schema": {"name": CANARY, "schema": schema}},
    )
    yield completion(f"say {CANARY}", **said)
    yield {
        "model": "fake",
        "input": CANARY,
        "instructions": CANARY,
        "max_output_tokens": 16,
        **said,
    }
    yield {"model": "fake", "prompt": CANARY}
    yield {
        "model": "fake",
        "input_prefix": CANARY,
        "input_suffix": CANARY,
        "input_extra": [{"filename": CANARY, "text": CANARY}],
        "max_tokens": 4,
    }
    yield {"model": CANARY, **{key: value for key, value in chat(CANARY).items() if key != "model"}}
    yield {"model": "fake", "messages": [{"role": CANARY, "content": CANARY}]}
    yield {"model": "fake", "messages": [{"role": "user", "content": {CANARY: CANARY}}]}
    for url in (f"https://{CANARY}/", f"ftp://{CANARY}/", f"data:image/{CANARY};base64,{CANARY}"):
        part = {"type": "image_url", "image_url": {"url": url}}
        yield {"model": "fake", "messages": [{"role": "user", "content": [part]}]}
    yield {
        "model": "fake",
        "messages": [{"role": "user", "content": CANARY}],
        "max_tokens": 4,
        "system": CANARY,
        "metadata": {"user_id": CANARY},
        "tools": [{"name": CANARY, "input_schema": schema}],
    }
    yield chat(
        CANARY,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {CANARY: 1, "type": CANARY}},
        },
    )
    yield chat(CANARY, chat_template=CANARY)
    yield from _ollama_canary_bodies(function)


def _ollama_canary_bodies(function: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """The same in Ollama's words."""
    call = {"function": {"name": CANARY, "arguments": {CANARY: CANARY}}}
    messages = [
        {"role": "user", "content": f"say {CANARY}"},
        {"role": "assistant", "thinking": CANARY, "tool_calls": [call]},
        {"role": "tool", "tool_name": CANARY, "content": CANARY},
    ]
    options = {"stop": [CANARY], "num_predict": 4, CANARY: CANARY}
    tools = [{"type": "function", "function": function}]
    yield {"model": "fake", "messages": messages, "tools": tools, "options": options}
    yield {"model": "fake", "prompt": CANARY, "system": CANARY, "raw": True}
    yield {"model": "fake", "prompt": f"say {CANARY}", "system": CANARY, "options": options}
    yield {"model": "fake", "prompt": CANARY, "template": CANARY, "images": [CANARY]}
    yield {"model": "fake", "prompt": CANARY, "format": CANARY, "keep_alive": CANARY}
    yield {"name": CANARY, "verbose": CANARY}


@contextmanager
def _rendered_logs() -> Iterator[io.StringIO]:
    """Yield what a log file would hold, at level debug."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    config, was_configured = structlog.get_config(), structlog.is_configured()
    stream = io.StringIO()
    configure_logs(level="debug", log_format="json", stream=stream)
    try:
        yield stream
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        if was_configured:
            structlog.configure(**config)
        else:
            structlog.reset_defaults()


@pytest.mark.parametrize(
    "given", ["", "a b", "x" * 65, "a/b", "a\tb", "\xe9", "{}", "a%0d%0ab", CANARY + ":1"]
)
def test_a_request_id_is_taken_only_when_it_is_harmless(locked: httpx.Client, given: str) -> None:
    """Anything but up to 64 letters, digits, dots, dashes and underscores is replaced."""
    answer = locked.get("/health", headers={b"X-Request-Id": given.encode("latin-1")})
    assert re.fullmatch(r"req-[0-9a-f]{24}", answer.headers["x-request-id"])
    kept = locked.get("/health", headers={"X-Request-Id": "A-z_0.9" * 9})
    assert kept.headers["x-request-id"] == "A-z_0.9" * 9
