"""Access to the server: hosts, browser pages, and the number of clients at once."""

from __future__ import annotations

import gc
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S
from support.daemon.running_daemon import RunningDaemon
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode

from machd.errors import EngineFaultError

PAGE = "https://chat.example.org"


@pytest.mark.parametrize(
    "host", ["192.0.2.7:8080", "[2001:db8::1]:8080", "127.0.0.1", "localhost:1"]
)
def test_an_address_is_a_host_that_nobody_can_fake(host: str) -> None:
    """IP addresses need no entry in http.allowed_hosts: no name server can point them elsewhere."""
    with RunningDaemon() as daemon:
        assert httpx.get(f"{daemon.url}/health", headers={"Host": host}).status_code == 200
        refused = httpx.get(f"{daemon.url}/health", headers={"Host": "evil.example"})

    assert refused.status_code == 421


def test_pages_of_an_allowed_origin_may_call_and_read() -> None:
    """The browser's preflight and the answer both carry what it needs; other origins get 403."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with RunningDaemon(flags={"http.allowed_origins": PAGE}) as daemon:
        url = f"{daemon.url}/v1/chat/completions"
        preflight = httpx.options(
            url,
            headers={
                "Origin": PAGE,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization, content-type",
            },
        )
        answer = httpx.post(url, json=body, headers={"Origin": PAGE})
        foreign = httpx.post(url, json=body, headers={"Origin": "https://evil.example"})

    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers


def test_long_paths_are_not_served_and_not_remembered() -> None:
    """Paths of 15,000 characters get 404 before they are routed, so no cache of routes keeps them."""
    with RunningDaemon() as daemon:
        served = _error_code(daemon.url, f"/v1/models/{'a' * 4000}")
        _error_code(daemon.url, f"/v1/models/{'a' * 15_000}")
        tracemalloc.start()
        try:
            codes = {
                _error_code(daemon.url, f"/v1/models/{number}{'a' * 15_000}")
                for number in range(200)
            }
            gc.collect()
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert served == "model_not_found"
    assert codes == {"not_found"}
    assert kept_bytes < 1_000_000


def _error_code(url: str, path: str) -> str:
    """Of a GET by a client that logs and keeps nothing."""
    with RawClient(url) as client:
        client.request("GET", path, headers={"Connection": "close"})
        return str(client.read_answer().json()["error"]["code"])


def test_too_many_open_requests_are_refused_and_health_is_not() -> None:
    """Beyond limits.max_in_flight: 503 with Retry-After; health still answers."""
    gate = StepGate(at_decode)
    body = {"model": "fake", "prompt": "hi", "max_tokens": 2, "stream": True}
    with (
        RunningDaemon(
            lambda: FakeEngine(before_step=gate), flags={"limits.max_in_flight": 1}
        ) as daemon,
        httpx.Client(base_url=daemon.url) as client,
    ):
        with client.stream("POST", "/v1/completions", json=body) as held:
            refused = httpx.get(f"{daemon.url}/v1/models")
            health = httpx.get(f"{daemon.url}/health")
            gate.open()
            held.read()
        later = httpx.get(f"{daemon.url}/v1/models")

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "too_many_in_flight"
    assert int(refused.headers["retry-after"]) >= 1
    assert health.status_code == 200
    assert later.status_code == 200


def test_a_hung_step_ends_the_daemon_and_everyone_is_told() -> None:
    """A step beyond engine.stall_timeout_s: the open request gets 503, the daemon ends with 70."""
    gate = StepGate()
    body = {"model": "fake", "prompt": "hi", "max_tokens": 2}
    daemon = RunningDaemon(
        lambda: FakeEngine(before_step=gate), flags={"engine.stall_timeout_s": 1}
    )
    with daemon:
        answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=CEILING_S)
        gate.open()
        assert daemon.join(CEILING_S)

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_fault"
    assert isinstance(daemon.error, EngineFaultError)
    assert daemon.error.exit_code == 70


def test_a_method_not_taken_names_those_that_are() -> None:
    """405 comes with Allow, as RFC 9110 asks."""
    with RunningDaemon() as daemon:
        answer = httpx.get(f"{daemon.url}/v1/chat/completions")
        other = httpx.delete(f"{daemon.url}/v1/models/some/model")

    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert (other.status_code, other.headers["allow"]) == (405, "GET")


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    """A client that sends half a body and waits gets 408 and holds nothing."""
    with (
        RunningDaemon(flags={"limits.client_stall_timeout_s": 1}) as daemon,
        RawClient(daemon.url) as client,
    ):
        client.request(
            "POST",
            "/v1/chat/completions",
            b"{",
            {"Content-Type": "application/json", "Content-Length": "100"},
        )
        answer = client.read_answer()

    assert answer.status == 408
    assert b"body_timeout" in answer.body


def test_an_engine_that_hangs_during_a_drain_ends_it_at_once() -> None:
    """The drain does not wait for an engine that no longer moves: 503 and exit code 70."""
    gate = StepGate(at_decode)
    body = {"model": "fake", "prompt": "hi", "max_tokens": 2}
    daemon = RunningDaemon(
        lambda: FakeEngine(before_step=gate), flags={"engine.stall_timeout_s": 1}
    )
    with daemon, ThreadPoolExecutor(1) as pool:
        open_request = pool.submit(
            httpx.post, f"{daemon.url}/v1/completions", json=body, timeout=CEILING_S
        )
        gate.wait_until_held()
        daemon.stop()
        answer = open_request.result()
        gate.open()
        assert daemon.join(CEILING_S)

    assert answer.status_code == 503
    assert isinstance(daemon.error, EngineFaultError)
