"""Connections at the edges of HTTP: idle, half-sent, half-closed, unread, framed twice, too many."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon
from support.daemon.connection_ages import ConnectionAges
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, scrape
from support.engines.dialogue import chat, sse_text, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode, at_prefill

from machd.engine.protocol.step import StepPlan
from machd.errors import SettingsError
from machd.http.file_limit import SPARE_CONNECTIONS

_CHAT = "/v1/chat/completions"
_ENDLESS = 50_000
_STALL_S = 30.0
"""The default of limits.client_stall_timeout_s."""


@pytest.fixture(name="ages")
def _ages(monkeypatch: pytest.MonkeyPatch) -> ConnectionAges:
    return ConnectionAges(monkeypatch)


def _daemon(gate: StepGate | None = None, **flags: object) -> RunningDaemon:
    settings = {name.replace("__", "."): value for name, value in flags.items()}
    gate = gate or _open_gate()
    return RunningDaemon(
        lambda: FakeEngine(told, before_step=gate, context_tokens=1_000_000), settings
    )


def _open_gate() -> StepGate:
    gate = StepGate()
    gate.open()
    return gate


def _disconnects(url: str) -> float:
    return scrape(url, "machd_aborts_total", reason="client_disconnected")


def _read_to_end(client: RawClient) -> bytes:
    """Return what came until the connection ended, in whichever way."""
    with suppress(ConnectionError):
        client.read_to_end(CEILING_S)
    return client.received


# Too many


def test_idle_connections_make_room_for_new_ones() -> None:
    """Beyond limits.max_connections the oldest idle connections are closed, and clients are served."""
    with _daemon(limits__max_connections=20) as daemon, ExitStack() as stack:
        idle = [stack.enter_context(RawClient(daemon.url)) for _ in range(60)]
        for number, client in enumerate(idle):
            if number % 2:
                with suppress(ConnectionError):
                    client.send(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert httpx.get(f"{daemon.url}/v1/models").status_code == 200
        assert _read_to_end(idle[0]) == b""
        assert not idle[-1].is_answered


def test_a_request_on_the_last_connection_is_refused_when_all_are_busy() -> None:
    """With a request on each of limits.max_connections: 503 with Retry-After; streams go on."""
    gate = StepGate(at_decode)
    with (
        _daemon(gate, limits__max_connections=2) as daemon,
        RawClient(daemon.url) as first,
        RawClient(daemon.url) as second,
        ExitStack() as stack,
        gate,
    ):
        for client in (first, second):
            client.post_json(_CHAT, chat("say abc", stream=True))
        gate.wait_until_held()
        wait_until(
            lambda: httpx.get(f"{daemon.url}/v1/models").status_code == 503, "two are answered"
        )
        for _ in range(3 * SPARE_CONNECTIONS):
            stack.enter_context(RawClient(daemon.url))
        refused = httpx.get(f"{daemon.url}/v1/models")
        assert refused.json()["error"]["code"] == "too_many_in_flight"
        assert "limits.max_connections" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        assert httpx.get(f"{daemon.url}/health").status_code == 200
        gate.open()
        for client in (first, second):
            assert sse_text(client.read_answer().body) == "abc"


def test_more_connections_than_open_files_are_refused_at_the_start() -> None:
    """A number that cannot be kept ends the start, and names both numbers."""
    with (
        pytest.raises(SettingsError, match=r"limits\.max_connections: 1000000 connections need"),
        _daemon(limits__max_connections=1_000_000),
    ):
        pass


def test_the_budget_changes_while_the_daemon_runs(tmp_path: Path) -> None:
    """A reload closes idle connections beyond the new number, and refuses one that does not fit."""
    with AdminDaemon(tmp_path) as daemon, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(daemon.daemon.url)) for _ in range(40)]
        assert daemon.admin.patch(
            "/admin/config", json={"limits": {"max_connections": 20}}
        ).is_success
        refused = daemon.admin.patch(
            "/admin/config", json={"limits": {"max_connections": 1_000_000}}
        )
        assert refused.status_code == 400
        assert "limits.max_connections" in refused.text
        stack.enter_context(RawClient(daemon.daemon.url))
        assert _read_to_end(clients[0]) == b""
        assert not clients[-1].is_answered


# Too slow


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nHost: loc"],
    ids=["nothing", "half a head"],
)
def test_a_connection_without_a_whole_head_is_closed(sent: bytes) -> None:
    """A client that sends no request within limits.client_stall_timeout_s loses its connection."""
    with _daemon(limits__client_stall_timeout_s=0.5) as daemon, RawClient(daemon.url) as client:
        with suppress(ConnectionError):  # it may be over already
            client.send(sent)
        assert _read_to_end(client) == b""


@pytest.mark.parametrize(
    "begun",
    [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"],
    ids=["first request", "second request"],
)
def test_a_head_that_drips_is_given_up(begun: bytes, ages: ConnectionAges) -> None:
    """Sending a byte now and then does not keep a connection open."""
    with _daemon() as daemon, RawClient(daemon.url) as client:
        client.send(begun)
        if begun:
            client.read_answer()
        _drip(client, b"GET /health HTTP/1.1\r\nX-Long: ", ages)


def test_a_body_that_drips_after_its_answer_is_given_up(ages: ConnectionAges) -> None:
    """A request that was refused before its body was read keeps the connection no longer than a head."""
    with _daemon() as daemon, RawClient(daemon.url) as client:
        client.request("POST", "/nowhere", b"", {"Content-Length": "1000000"})
        assert client.read_answer().status == 404
        _drip(client, b"", ages)


def _drip(client: RawClient, first: bytes, ages: ConnectionAges) -> None:
    """Send a byte at a time while the connection ages, until it ends; fail if it does not."""

    def has_ended() -> bool:
        with suppress(ConnectionError):
            client.send(b"a")
        ages.advance(_STALL_S / 10)
        return not client.is_open

    client.send(first)
    wait_until(has_ended, "the connection is closed")


def test_an_idle_connection_stays_longer_than_a_head_may_take(ages: ConnectionAges) -> None:
    """limits.client_stall_timeout_s is no limit for a client that keeps its connection between requests."""
    with _daemon() as daemon, RawClient(daemon.url) as client:
        for _ in range(2):
            client.request("GET", "/health")
            assert client.read_answer().status == 200
            client.received = b""
            ages.advance(5 * _STALL_S)
            ages.advance(5 * _STALL_S)
        assert client.is_open


# Unread


@pytest.mark.parametrize("characters", [60, 20_000], ids=["short", "long"])
def test_a_stream_that_is_never_read_loses_its_connection(
    characters: int, ages: ConnectionAges
) -> None:
    """Unread data is noticed below the kernel's buffers, after the last event as well."""
    with (
        _daemon() as daemon,
        RawClient(daemon.url, receive_buffer_bytes=2048) as client,
    ):
        client.post_json(_CHAT, _long_chat(characters))
        client.read_until(b'"content":"')

        def is_closed() -> bool:
            ages.advance(_STALL_S / 10)
            return not client.is_held

        wait_until(is_closed, "the connection is closed")
        wait_until(lambda: is_idle(daemon.url), "nothing runs and nothing waits")

        def stalled() -> float:
            return scrape(daemon.url, "machd_aborts_total", reason="client_stalled")

        # The handler counts what it has lost, after the engine has.
        if characters == 20_000:
            wait_until(lambda: stalled() == 1, "the stream is counted")
        else:
            assert stalled() == 0


def test_a_slow_reader_keeps_its_stream(ages: ConnectionAges) -> None:
    """A client that takes a little within each limits.client_stall_timeout_s gets the whole answer."""
    aged_s = 0.0
    with (
        _daemon() as daemon,
        RawClient(daemon.url, receive_buffer_bytes=32_768) as client,
    ):
        client.post_json(_CHAT, _long_chat(800))
        read_bytes = 0
        while b"[DONE]" not in client.received[-100:]:
            client.receive(8192)
            # Twice what the kernel holds here: its acknowledgements have come by then.
            if len(client.received) >= read_bytes + 131_072:
                read_bytes = len(client.received)
                ages.advance(0.9 * _STALL_S)
                aged_s += 0.9 * _STALL_S
        assert scrape(daemon.url, "machd_aborts_total", reason="client_stalled") == 0
    assert aged_s > 2 * _STALL_S, "the answer took longer than a client may do nothing"


def _long_chat(characters: int) -> dict[str, object]:
    """A stream with about a kilobyte of log-probabilities for each character."""
    return chat(
        "say " + "x" * characters,
        stream=True,
        max_tokens=2 * characters,
        logprobs=True,
        top_logprobs=20,
    )


# Half-closed


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("holds", [at_prefill, at_decode], ids=["prefill", "decode"])
def test_a_client_that_closes_its_side_only_is_answered(
    stream: bool,  # noqa: FBT001
    holds: Callable[[StepPlan], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole request is answered though its end of the connection is closed; then it is closed."""
    monkeypatch.setattr("machd.http.connection._PROBED_S", 0.0)
    gate = StepGate(holds)
    with _daemon(gate) as daemon, RawClient(daemon.url) as client, gate:
        client.post_json(_CHAT, chat("say abc", stream=stream))
        client.half_close()
        gate.wait_until_held()
        has_begun = stream and holds is at_decode
        client.read_until(b": keep-alive" if has_begun else b"HTTP/1.1 102 Processing\r\n\r\n")
        assert _disconnects(daemon.url) == 0, "the client was probed and is there"
        gate.open()
        received = _read_to_end(client)
        assert _disconnects(daemon.url) == 0
    answer = re.sub(rb"^HTTP/1.1 102 Processing\r\n\r\n", b"", received)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in answer.lower().partition(b"\r\n\r\n")[0]
    client.received = answer
    if stream:
        assert sse_text(client.body) == "abc"
    else:
        assert client.read_answer().json()["choices"][0]["message"]["content"] == "abc"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_quick_answer_follows_a_half_close_without_more(version: str) -> None:
    """Requests without a generation are answered at once, in both versions of HTTP."""
    with _daemon() as daemon, RawClient(daemon.url) as client:
        client.send(f"GET /v1/models HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
        client.half_close()
        received = _read_to_end(client)
    assert b" 200 OK\r\n" in received
    assert b'"object":"list"' in received


def test_a_half_closed_generation_of_http_1_0_counts_as_left() -> None:
    """HTTP/1.0 has no interim answers, so a client that closed its side cannot be told from one that left."""
    gate = StepGate(at_decode)
    with _daemon(gate) as daemon, RawClient(daemon.url) as client, gate:
        body = json.dumps(chat("hi", max_tokens=_ENDLESS)).encode()
        head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        client.send(f"POST {_CHAT} HTTP/1.0\r\n{head}\r\n\r\n".encode() + body)
        gate.wait_until_held()
        client.half_close()
        wait_until(lambda: _disconnects(daemon.url) == 1, "it counts as left")
        gate.open()
        wait_until(lambda: is_idle(daemon.url), "nothing runs and nothing waits")


def test_half_a_body_and_a_half_close_is_a_departure() -> None:
    """Without the whole request there is nothing to answer."""
    with _daemon() as daemon, RawClient(daemon.url) as client:
        client.request(
            "POST", _CHAT, b"{", {"Content-Type": "application/json", "Content-Length": "100"}
        )
        client.half_close()
        assert _read_to_end(client) == b""


# Framing, HEAD


@pytest.mark.parametrize("admin", [False, True], ids=["public", "admin"])
def test_a_body_with_two_lengths_is_refused(admin_daemon: AdminDaemon, *, admin: bool) -> None:
    """Content-Length beside Transfer-Encoding: 400, and the connection is closed."""
    with RawClient(admin_daemon.admin_url if admin else admin_daemon.daemon.url) as client:
        client.request(
            "POST",
            _CHAT,
            b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            {"Transfer-Encoding": "chunked", "Content-Length": "5"},
        )
        received = _read_to_end(client)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics"])
@pytest.mark.parametrize("admin", [False, True], ids=["public", "admin"])
def test_head_is_get_without_the_body(admin_daemon: AdminDaemon, path: str, *, admin: bool) -> None:
    """Health and metrics answer HEAD with the status and headers of GET."""
    http = admin_daemon.admin if admin else admin_daemon.http
    head, get = http.head(path), http.get(path)
    assert (head.status_code, get.status_code) == (200, 200)
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 0
    assert http.post(path).headers["allow"] == "GET, HEAD"


@pytest.fixture(scope="module")
def admin_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminDaemon]:
    """A daemon with both listeners."""
    with AdminDaemon(tmp_path_factory.mktemp("admin"), FakeEngine) as daemon:
        yield daemon
