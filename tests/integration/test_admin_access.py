"""Access to the admin API: with its token, and never from a web page."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.running_daemon import RunningDaemon
from support.engines.fake_engine import FakeEngine

from machd.admin.endpoints import ADMIN_ENDPOINTS
from machd.engine.protocol.step import StepPlan
from machd.errors import SettingsError
from machd.http.endpoint import Endpoint

_KEY = "public-key-0123456789"
_HEALTH = {"/health", "/health/live", "/health/ready"}
_GUARDED = [one for one in ADMIN_ENDPOINTS if one.path not in _HEALTH]
each_guarded = pytest.mark.parametrize("endpoint", _GUARDED, ids=lambda one: str(one.name))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminDaemon]:
    """One with API keys on its public port."""
    directory = tmp_path_factory.mktemp("runtime")
    keys = directory / "keys"
    keys.write_text(f"somebody:{_KEY}\n")
    with AdminDaemon(directory, flags={"auth.api_keys_file": str(keys)}) as running:
        yield running


def _path(endpoint: Endpoint) -> str:
    return endpoint.path.replace("{id}", "default")  # as a model, it is always served


def _check_refusal(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    error = dict(answer.json()["error"])
    assert (error["code"], error["param"]) == (code, None)
    assert error["message"]
    return error


@each_guarded
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong-token-of-some-length"},
        {"Authorization": f"Bearer {_KEY}"},
        {"X-Api-Key": _KEY},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic dXNlcjpwYXNz"},
    ],
)
def test_no_route_opens_without_the_token(
    daemon: AdminDaemon, endpoint: Endpoint, headers: dict[str, str]
) -> None:
    """Every method of every route but health: 401, with nothing done; a public key is no token."""
    before = daemon.status
    answer = httpx.request(
        endpoint.method, f"{daemon.admin_url}{_path(endpoint)}", json={}, headers=headers
    )
    _check_refusal(answer, 401, "invalid_api_key")
    assert daemon.status["state"] == before["state"] == "ready"
    assert daemon.status["config"] == before["config"]


def test_the_token_is_no_public_key(daemon: AdminDaemon) -> None:
    """The credentials of one listener do not open the other."""
    refused = httpx.get(
        f"{daemon.daemon.url}/v1/models", headers={"Authorization": f"Bearer {daemon.token}"}
    )
    assert refused.status_code == 401


@each_guarded
def test_no_admin_route_is_on_the_public_port(daemon: AdminDaemon, endpoint: Endpoint) -> None:
    """The public port has none of it, whatever is sent along."""
    if endpoint.path in {"/metrics", "/v1/capabilities"}:
        return  # both have it, each behind its own credential
    answer = daemon.http.request(
        endpoint.method,
        _path(endpoint),
        headers={"Authorization": f"Bearer {_KEY}", "X-Admin-Token": str(daemon.token)},
    )
    assert answer.status_code == 404


def test_health_needs_no_token(daemon: AdminDaemon) -> None:
    """A watchdog without a token sees whether the daemon lives and works."""
    for path in sorted(_HEALTH):
        assert httpx.get(f"{daemon.admin_url}{path}").json()["state"] == "ready"


def test_metrics_are_there_for_who_has_the_token(daemon: AdminDaemon) -> None:
    """Prometheus can scrape the admin listener."""
    assert "machd_build_info" in daemon.admin.get("/metrics").text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "10.0.0.1", "localhost.evil.example", "a b"]
)
def test_a_foreign_host_is_refused(daemon: AdminDaemon, host: str) -> None:
    """A name that was made to point here gets nothing, even with the token."""
    with RawClient(daemon.admin_url) as client:
        client.request(
            "GET",
            "/admin/status",
            headers={"Host": host, "Authorization": f"Bearer {daemon.token}"},
        )
        assert client.read_answer().status == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]:8081", "x.localhost:1"])
def test_loopback_hosts_are_let_in(daemon: AdminDaemon, host: str) -> None:
    """However loopback is written."""
    answer = daemon.admin.get("/admin/status", headers={"Host": host})
    assert answer.status_code == 200


@pytest.mark.parametrize("origin", ["http://localhost:8081", "null", "https://evil.example"])
@pytest.mark.parametrize("path", ["/admin/status", "/health", "/nowhere"])
def test_pages_are_refused(daemon: AdminDaemon, origin: str, path: str) -> None:
    """A request with an Origin comes from a page, and no page has business here."""
    answer = daemon.admin.get(path, headers={"Origin": origin})
    _check_refusal(answer, 403, "origin_not_allowed")
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_preflight_gets_nothing(daemon: AdminDaemon) -> None:
    """No CORS at all."""
    answer = daemon.admin.options(
        "/admin/status",
        headers={"Origin": "http://localhost", "Access-Control-Request-Method": "PATCH"},
    )
    assert answer.status_code == 403


def test_a_body_is_bounded(daemon: AdminDaemon) -> None:
    """64 KiB are enough for any setting."""
    body = b'{"http":{"allowed_hosts":["' + b"a" * 70_000 + b'"]}}'
    answer = daemon.admin.patch(
        "/admin/config", content=body, headers={"Content-Type": "application/json"}
    )
    _check_refusal(answer, 413, "body_too_large")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(daemon: AdminDaemon, media_type: str) -> None:
    """A content type that a browser sends unasked is not taken for JSON."""
    answer = daemon.admin.post(
        "/admin/mode", content=b'{"mode":"single"}', headers={"Content-Type": media_type}
    )
    _check_refusal(answer, 415, "unsupported_media_type")


def test_unknown_paths_and_methods(daemon: AdminDaemon) -> None:
    """404 in the envelope, and 405 with what the path takes."""
    _check_refusal(daemon.admin.get("/admin/nothing"), 404, "not_found")
    answer = daemon.admin.put("/admin/config")
    _check_refusal(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, PATCH"


def test_the_table_is_what_is_served(daemon: AdminDaemon) -> None:
    """Every route of the table exists: with the token none answers 404 or 405."""
    quick = [
        one
        for one in _GUARDED
        if one.name not in {"watch_events", "watch_overview", "abort_requests"}
    ]
    for endpoint in quick:
        answer = daemon.admin.request(endpoint.method, _path(endpoint))
        assert answer.status_code in {one.status for one in endpoint.answers}, endpoint.name
        assert answer.status_code not in {404, 405, 500}, endpoint.name
    assert daemon.admin.post("/admin/resume").status_code == 200


# --- the token itself ---------------------------------------------------------------------------


def test_the_token_is_only_for_the_daemons_user(tmp_path: Path) -> None:
    """A new one for each start, in a file of mode 0600 in a directory of mode 0700; gone at the end."""
    tokens = set()
    for _ in range(2):
        with AdminDaemon(tmp_path) as running:
            file = running.token_file
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
            tokens.add(running.token)
        assert not file.exists()
    assert len(tokens) == 2
    assert all(token and len(token) >= 32 for token in tokens)


def test_the_service_managers_directory_comes_first(tmp_path: Path) -> None:
    """$RUNTIME_DIRECTORY, of which there may be several, is the service's own."""
    own = tmp_path / "service"
    own.mkdir(mode=0o755)
    environ = {"RUNTIME_DIRECTORY": f"{own}:{tmp_path / 'other'}"}
    with AdminDaemon(tmp_path, environ=environ) as running:
        assert [one.name for one in own.iterdir()] == [running.token_file.name]
        assert not running.token_file.exists()


def test_a_directory_that_others_write_to_is_refused(tmp_path: Path) -> None:
    """A token file that other users may write is refused."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with (
        pytest.raises(SettingsError, match="can be written by others"),
        AdminDaemon(tmp_path, environ={"RUNTIME_DIRECTORY": str(shared)}),
    ):
        pass
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with (
        pytest.raises(SettingsError, match="no directory of the user"),
        AdminDaemon(tmp_path, environ={"RUNTIME_DIRECTORY": str(link)}),
    ):
        pass


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        ("0123456789abcdef\n", 0o644, "chmod 600"),
        ("0123456789abcdef\n", 0o640, "chmod 600"),
        ("", 0o600, "is empty"),
        ("\n", 0o600, "is empty"),
        ("short-secret", 0o600, "at least 16 characters"),
        (None, 0o600, "cannot read"),
    ],
)
def test_a_bad_token_file_is_refused(
    tmp_path: Path, content: str | None, mode: int, problem: str
) -> None:
    """The daemon does not start with a token that others know, and quotes none."""
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with (
        pytest.raises(SettingsError, match=problem) as refusal,
        AdminDaemon(tmp_path, flags={"auth.admin_token_file": str(file)}),
    ):
        pass
    assert "secret" not in refusal.value.message
    assert "0123" not in refusal.value.message


@pytest.mark.parametrize("source", ["settings", "credential"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_token_file_that_is_no_file_is_refused_at_once(
    tmp_path: Path, source: str, kind: str
) -> None:
    """The start is never kept waiting; a credential that cannot be read is not passed over."""
    path = tmp_path / "admin-token"
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.symlink_to("/dev/zero")
    flags = {"auth.admin_token_file": str(path)} if source == "settings" else {}
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)} if source == "credential" else {}
    with (
        pytest.raises(SettingsError, match="not a regular file"),
        AdminDaemon(tmp_path, flags=flags, environ=environ),
    ):
        pass


def test_a_key_file_that_is_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    """The change is refused, and the next one is taken."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with AdminDaemon(tmp_path) as running:
        change = {"auth": {"api_keys_file": str(pipe)}}
        assert "not a regular file" in running.admin.patch("/admin/config", json=change).text
        assert running.admin.put("/admin/log-level", json={"level": "info"}).status_code == 200


def test_keys_that_go_away_do_not_open_the_daemon(tmp_path: Path) -> None:
    """A change of something else is refused while the service manager's keys are missing."""
    keys = tmp_path / "api-keys"
    keys.write_text(f"somebody:{_KEY}\n")
    keys.chmod(0o600)
    with AdminDaemon(tmp_path, environ={"CREDENTIALS_DIRECTORY": str(tmp_path)}) as running:
        keys.unlink()
        assert "gone away" in running.admin.put("/admin/log-level", json={"level": "info"}).text
        assert "gone away" in running.admin.post("/admin/reload").text
        assert running.http.get("/v1/models").status_code == 401
        headers = {"Authorization": f"Bearer {_KEY}"}
        assert running.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8")
def test_addresses_with_the_same_port_have_tokens_of_their_own(tmp_path: Path) -> None:
    """A second daemon neither replaces nor removes the first one's."""
    with AdminDaemon(tmp_path) as first:
        port = first.admin_url.rpartition(":")[2]
        with AdminDaemon(tmp_path, flags={"admin.listen": f"127.0.0.2:{port}"}):
            assert (tmp_path / "machd" / f"admin-127.0.0.2-{port}.token").exists()
            assert first.token_file.read_text().strip() == first.token
        assert [one.name for one in (tmp_path / "machd").iterdir()] == [first.token_file.name]


def test_the_token_goes_before_the_address_does(tmp_path: Path) -> None:
    """The token file is deleted before the address is free: its next owner may write one of that name."""
    plans: list[StepPlan] = []

    def dawdle(plan: StepPlan) -> None:
        plans.append(plan)
        time.sleep(2)

    flags = {"limits.drain_timeout_s": 0.0}
    with (
        AdminDaemon(tmp_path, lambda: FakeEngine(before_step=dawdle), flags) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        body = {"model": "fake", "prompt": "hello", "max_tokens": 9}
        asked = pool.submit(running.http.post, "/v1/completions", json=body, timeout=CEILING_S)
        wait_until(lambda: bool(plans), "the step has begun")
        running.daemon.stop()
        wait_until(lambda: _is_refused(running.admin_url), "the address is free")
        assert not running.token_file.exists()
        assert not running.daemon.join(0)
        asked.result()


def _is_refused(url: str) -> bool:
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) != 0


@pytest.mark.parametrize("source", ["settings", "credential"])
def test_an_operators_token_is_used(tmp_path: Path, source: str) -> None:
    """From the file of the settings or of the service manager; then none is made."""
    token = "operator-token-0123456789"
    directory = tmp_path / "credentials"
    directory.mkdir()
    file = directory / "admin-token"
    file.write_text(f"{token}\n")
    file.chmod(0o600)
    flags = {"auth.admin_token_file": str(file)} if source == "settings" else {}
    environ = {"CREDENTIALS_DIRECTORY": str(directory)} if source == "credential" else {}
    with AdminDaemon(tmp_path, flags=flags, environ=environ) as running:
        assert running.token is None
        url = f"{running.admin_url}/admin/status"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"Authorization": f"Bearer {token}"}).status_code == 200
        assert httpx.get(url, headers={"Authorization": f"bearer {token}"}).status_code == 200
    assert file.exists()


def test_a_unix_socket_needs_no_token(tmp_path: Path) -> None:
    """Any client that can open the socket has access, whatever its Host header; a web page has not."""
    path = tmp_path / "admin.sock"
    flags = {"admin.listen": f"unix:{path}"}
    with RunningDaemon(flags=flags, environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as daemon:
        assert daemon.admin_url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://anything"
        ) as client:
            assert client.get("/admin/status").json()["state"] == "ready"
            assert client.get("/admin/status", headers={"Origin": "x"}).status_code == 403
        assert not (tmp_path / "machd").exists()


def test_tokens_are_never_logged(tmp_path: Path) -> None:
    """Neither the right one nor what a stranger tries is in any log line."""
    with capture_logs() as lines, AdminDaemon(tmp_path) as running:
        tried = "stranger-token-0123456789"
        httpx.get(f"{running.admin_url}/admin/status", headers={"Authorization": f"Bearer {tried}"})
        running.admin.put("/admin/log-level", json={"level": "xxxxx"})
        running.admin.post("/admin/reload")
        running.admin.get("/admin/requests")
        token = str(running.token)
    text = json.dumps(lines, default=str)
    assert "daemon.ready" in text
    assert not re.search(f"{re.escape(token)}|{tried}", text)
