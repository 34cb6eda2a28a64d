"""The stream of events for operators: its contents, and that it never delays requests."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.admin_daemon import AdminDaemon, sse_events
from support.daemon.connection_ages import ConnectionAges
from support.engines.dialogue import chat, told
from support.engines.fake_engine import FakeEngine

from machd.admin.event_feed import MAX_WATCHERS

_CHAT = "/v1/chat/completions"


def _watch(client: RawClient, daemon: AdminDaemon) -> None:
    client.request("GET", "/admin/events", headers={"Authorization": f"Bearer {daemon.token}"})
    client.read_until(b"event: state")


def test_the_life_of_a_request_is_seen_without_its_words(tmp_path: Path) -> None:
    """First the state, then the sequence's way and the steps; never a word of prompt or answer."""
    with (
        AdminDaemon(tmp_path, lambda: FakeEngine(told)) as daemon,
        daemon.admin.stream("GET", "/admin/events") as stream,
    ):
        assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = sse_events(stream)
        name, first = next(events)
        assert (name, first["type"], first["state"]) == ("state", "state", "ready")
        made = daemon.http.post(_CHAT, json=chat("say xyzzy")).json()
        seen = [first]
        for name, event in events:
            assert name == event["type"]
            seen.append(event)
            if name == "finished":
                break
        kinds = [one["type"] for one in seen]
        assert kinds[1:3] == ["queued", "admitted"]
        assert "step" in kinds
        assert seen[1]["sequence_id"] == f"{made['id']}/0"
        assert seen[-1]["reason"] == "stop"
        assert seen[-1]["completion_tokens"] == made["usage"]["completion_tokens"]
        assert "xyzzy" not in str(seen)
        assert all(one["at"] > 1_000_000_000 for one in seen)


def test_changes_by_operators_are_seen(tmp_path: Path) -> None:
    """Settings, also those that are refused, and the state."""
    with (
        AdminDaemon(tmp_path) as daemon,
        daemon.admin.stream("GET", "/admin/events") as stream,
        httpx.Client(base_url=daemon.admin_url, headers=daemon.admin.headers) as other,
    ):
        events = sse_events(stream)
        next(events)
        other.patch("/admin/config", json={"limits": {"max_n": 2}})
        other.patch("/admin/config", json={"limits": {"max_n": 0}})
        other.post("/admin/drain")
        other.post("/admin/resume")
        (_, made), (_, refused), (_, drained), (_, resumed) = (next(events) for _ in range(4))
        assert (made["ok"], made["changed"]) == (True, ["limits.max_n"])
        assert (refused["ok"], len(refused["problems"])) == (False, 1)
        assert [drained["state"], resumed["state"]] == ["draining", "ready"]


def test_a_watch_ends_when_the_daemon_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last event is the last state, and no watcher keeps the daemon from leaving."""
    for wait in ("machd.http.server._GRACE_S", "machd.daemon._SERVER_JOIN_S"):
        monkeypatch.setattr(wait, 3600)  # longer than the test: it may not be waited for
    with AdminDaemon(tmp_path) as daemon, daemon.admin.stream("GET", "/admin/events") as stream:
        events = sse_events(stream)
        next(events)
        daemon.daemon.stop()
        assert [event["state"] for _, event in events] == ["draining", "stopped"]
        assert daemon.daemon.join(CEILING_S)


def test_a_silent_stream_shows_signs_of_life(tmp_path: Path) -> None:
    """Comments come every ``streaming.keepalive_s``."""
    with (
        AdminDaemon(tmp_path, flags={"streaming.keepalive_s": 0.1}) as daemon,
        RawClient(daemon.admin_url) as client,
    ):
        _watch(client, daemon)
        client.read_until(b": keep-alive\n\n")


def test_there_is_room_for_some_watchers_and_one_that_leaves_makes_room(tmp_path: Path) -> None:
    """One too many gets 503; a connection that is closed counts no longer."""
    with AdminDaemon(tmp_path) as daemon:
        clients = [RawClient(daemon.admin_url) for _ in range(MAX_WATCHERS)]
        try:
            for client in clients:
                _watch(client, daemon)
            refused = daemon.admin.get("/admin/events")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_in_flight"
            assert int(refused.headers["retry-after"]) >= 1
            clients[0].reset()

            def has_room() -> bool:
                with daemon.admin.stream("GET", "/admin/events") as stream:
                    return stream.status_code == 200

            wait_until(has_room, "there is room again")
        finally:
            for client in clients:
                client.close()


def test_a_watcher_that_does_not_read_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered as ever, and in the end the daemon cuts the watcher's connection."""
    ages = ConnectionAges(monkeypatch)
    stall_s = 30.0  # the default of limits.client_stall_timeout_s
    with (
        AdminDaemon(tmp_path, lambda: FakeEngine(context_tokens=50_000)) as daemon,
        RawClient(daemon.admin_url, receive_buffer_bytes=1024) as stalled,
    ):
        _watch(stalled, daemon)
        for _ in range(8):
            answer = daemon.http.post(_CHAT, json=chat(max_tokens=2000))
            assert answer.status_code == 200
            ages.advance(stall_s / 2)
        with suppress(ConnectionResetError):
            stalled.read_to_end()
        assert not stalled.received.endswith(b"\r\n0\r\n\r\n"), "it was cut, not ended"
        assert daemon.status["state"] == "ready"
