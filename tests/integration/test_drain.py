"""The daemon's stop, and its addresses."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.running_daemon import RunningDaemon
from support.daemon.scraping import is_idle, scrape
from support.engines.dialogue import chat, sse_data, sse_text, told
from support.engines.fake_engine import FakeEngine
from support.engines.step_gate import StepGate, at_decode

from machd.errors import ListenError

_CHAT = "/v1/chat/completions"
_NEVER_S = 3600
"""A timeout that is longer than any test waits: what ends nevertheless has not waited for it."""


def _start(
    gate: StepGate, *, drain_timeout_s: float = _NEVER_S, drain_notice_s: float = 0.0
) -> RunningDaemon:
    flags = {
        "limits.drain_timeout_s": drain_timeout_s,
        "limits.drain_notice_s": drain_notice_s,
        "limits.client_stall_timeout_s": _NEVER_S,
    }
    return RunningDaemon(
        lambda: FakeEngine(told, before_step=gate, context_tokens=1_000_000), flags
    )


@pytest.fixture(name="no_grace")
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server wait for connections for longer than a test does, where it waits at all."""
    monkeypatch.setattr("machd.http.server._GRACE_S", _NEVER_S)
    monkeypatch.setattr("machd.daemon._SERVER_JOIN_S", _NEVER_S)


def _wait_until_not_ready(url: str) -> None:
    wait_until(
        lambda: httpx.get(f"{url}/health/ready").status_code == 503, "the daemon is not ready"
    )


def test_a_stream_ends_well_while_new_requests_are_refused() -> None:
    """While it drains the daemon lives, is not ready, refuses new work and finishes the old."""
    gate = StepGate(at_decode)
    with (
        _start(gate) as daemon,
        RawClient(daemon.url) as stream,
        httpx.Client(base_url=daemon.url) as client,
        gate,
    ):
        stream.post_json(_CHAT, chat("say hello there", stream=True))
        stream.read_until(b'"content":"h"')
        daemon.stop()
        _wait_until_not_ready(daemon.url)
        ready = client.get("/health/ready")
        assert ready.json()["state"] == "draining"
        assert ready.json()["reason"]
        live = client.get("/health/live")
        assert live.status_code == 200
        assert live.json()["state"] == "draining"
        for is_stream in (False, True):
            refused = client.post(_CHAT, json=chat("say hi", stream=is_stream))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/v1/models").status_code == 200
        assert scrape(daemon.url, "machd_rejections_total", reason="draining") == 2
        assert scrape(daemon.url, "machd_state", state="draining") == 1
        gate.open()
        answer = stream.read_answer()
        assert sse_text(answer.body) == "hello there"
        assert all("error" not in event for event in sse_data(answer.body))
        assert daemon.join(CEILING_S)
        assert daemon.error is None


def test_new_requests_are_answered_during_the_notice() -> None:
    """From the signal on the daemon is not ready, and answers new requests as before."""
    gate = StepGate()
    gate.open()
    with (
        _start(gate, drain_notice_s=_NEVER_S) as daemon,
        httpx.Client(base_url=daemon.url) as client,
    ):
        daemon.stop()
        _wait_until_not_ready(daemon.url)
        ready = client.get("/health/ready").json()
        assert (ready["status"], ready["state"]) == ("unavailable", "leaving")
        assert client.get("/health/live").status_code == 200
        for is_stream in (False, True):
            answer = client.post(_CHAT, json=chat("say hi", stream=is_stream))
            assert answer.status_code == 200
        assert scrape(daemon.url, "machd_state", state="leaving") == 1
        assert scrape(daemon.url, "machd_rejections_total", reason="draining") == 0


def test_the_drain_begins_when_the_notice_is_over() -> None:
    """After the notice new requests get 503 ``draining``, and what was taken during it is finished."""
    gate = StepGate(at_decode)
    with (
        _start(gate, drain_notice_s=0.5) as daemon,
        RawClient(daemon.url) as stream,
        gate,
    ):
        daemon.stop()
        stream.post_json(_CHAT, chat("say hello there", stream=True))
        stream.read_until(b'"content":"h"')
        wait_until(
            lambda: scrape(daemon.url, "machd_state", state="draining") == 1, "the notice is over"
        )
        refused = httpx.post(f"{daemon.url}{_CHAT}", json=chat("say hi"))
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        gate.open()
        assert sse_text(stream.read_answer().body) == "hello there"
        assert daemon.join(CEILING_S)
        assert daemon.error is None


def test_an_idle_daemon_gives_its_whole_notice() -> None:
    """Without open requests the notice is not cut short: only a second stop ends it."""
    gate = StepGate()
    gate.open()
    with _start(gate, drain_notice_s=_NEVER_S) as daemon:
        daemon.stop()
        _wait_until_not_ready(daemon.url)
        assert scrape(daemon.url, "machd_state", state="leaving") == 1
        daemon.stop()
        assert daemon.join(CEILING_S)
        assert daemon.error is None


def test_a_second_stop_during_the_notice_ends_at_once() -> None:
    """The second stop waits neither for the notice nor for the drain: streams end with the error."""
    gate = StepGate(at_decode)
    with (
        _start(gate, drain_notice_s=_NEVER_S) as daemon,
        RawClient(daemon.url) as stream,
        gate,
    ):
        stream.post_json(_CHAT, chat("say hello", stream=True))
        stream.read_until(b'"content":"h"')
        daemon.stop()
        _wait_until_not_ready(daemon.url)
        gate.wait_until_held()
        daemon.stop()
        assert sse_data(stream.read_answer().body)[-1]["error"]["code"] == "drain_deadline"
        gate.open()
        assert daemon.join(CEILING_S)
        assert daemon.error is None


def test_what_waits_is_finished_too() -> None:
    """A request that was queued before the stop is answered before the end."""
    gate = StepGate()
    with (
        _start(gate) as daemon,
        RawClient(daemon.url) as running,
        RawClient(daemon.url) as waiting,
        gate,
    ):
        running.post_json(_CHAT, chat("hi", max_tokens=5000))
        gate.wait_until_held()
        waiting.post_json(_CHAT, chat("say patience"))
        gate.step_until(
            lambda: scrape(daemon.url, "machd_requests_waiting") == 1, "one request waits"
        )
        daemon.stop()
        _wait_until_not_ready(daemon.url)
        gate.open()
        assert running.read_answer().json()["usage"]["completion_tokens"] == 5000
        assert waiting.read_answer().json()["choices"][0]["message"]["content"] == "patience"
        assert daemon.join(CEILING_S)


def test_at_the_deadline_open_requests_are_ended() -> None:
    """A stream ends with an error event and ``[DONE]``; a whole answer, and one that waits, is 503."""
    gate = StepGate(at_decode)
    with (
        _start(gate, drain_timeout_s=0.2) as daemon,
        RawClient(daemon.url) as stream,
        RawClient(daemon.url) as waiting,
        gate,
    ):
        stream.post_json(_CHAT, chat("say hello", stream=True))
        stream.read_until(b'"content":"h"')
        gate.wait_until_held()
        waiting.post_json(_CHAT, chat("say hi"))
        wait_until(lambda: not is_idle(daemon.url), "the stream runs")
        daemon.stop()
        answer = stream.read_answer()
        assert sse_text(answer.body) == "h"
        assert sse_data(answer.body)[-1]["error"]["code"] == "drain_deadline"
        late = waiting.read_answer()
        assert late.status == 503
        assert late.json()["error"]["code"] in ("drain_deadline", "draining")
        gate.open()
        assert daemon.join(CEILING_S)
        assert daemon.error is None


def test_a_whole_answer_is_ended_at_the_deadline() -> None:
    """A client that waits for a whole answer gets the deadline in the envelope."""
    gate = StepGate(at_decode)
    with (
        _start(gate, drain_timeout_s=0.2) as daemon,
        RawClient(daemon.url) as client,
        gate,
    ):
        client.post_json(_CHAT, chat("say hello"))
        gate.wait_until_held()
        daemon.stop()
        answer = client.read_answer()
        assert answer.status == 503
        assert answer.json()["error"]["code"] == "drain_deadline"
        gate.open()
        assert daemon.join(CEILING_S)


def test_a_second_stop_ends_at_once() -> None:
    """The second stop waits neither for the deadline nor for the step: streams end with the error."""
    gate = StepGate(at_decode)
    with _start(gate) as daemon, RawClient(daemon.url) as stream, gate:
        stream.post_json(_CHAT, chat("say hello", stream=True))
        stream.read_until(b'"content":"h"')
        daemon.stop()
        _wait_until_not_ready(daemon.url)
        gate.wait_until_held()
        daemon.stop()
        answer = stream.read_answer()
        assert sse_data(answer.body)[-1]["error"]["code"] == "drain_deadline"
        gate.open()
        assert daemon.join(CEILING_S)
        assert daemon.error is None


def test_a_second_stop_does_not_wait_for_a_client_that_reads_nothing() -> None:
    """A stalled client cannot delay a daemon that was told to stop at once."""
    gate = StepGate()
    gate.open()
    with _start(gate) as daemon, RawClient(daemon.url, receive_buffer_bytes=4096) as slow:
        body = chat("hi", stream=True, max_tokens=9000, logprobs=True, top_logprobs=20)
        slow.post_json(_CHAT, body)
        slow.read_until(b"data: ")
        wait_until(lambda: is_idle(daemon.url), "the engine has computed the slow one's stream")
        daemon.stop()
        _wait_until_not_ready(daemon.url)
        daemon.stop()
        has_ended = daemon.join(CEILING_S)
        slow.reset()
        assert has_ended


@pytest.mark.usefixtures("no_grace")
def test_an_idle_daemon_stops_without_waiting_for_its_connections() -> None:
    """Without work, neither idle connections nor half-sent requests delay the end."""
    gate = StepGate()
    with (
        _start(gate) as daemon,
        httpx.Client(base_url=daemon.url) as idle,
        RawClient(daemon.url) as silent,
        RawClient(daemon.url) as half,
    ):
        assert idle.get("/health").status_code == 200
        half.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        assert not silent.is_answered
        daemon.stop()
        assert daemon.join(CEILING_S)
        assert daemon.error is None


def test_a_daemon_that_loads_stops_before_the_model_is_there() -> None:
    """A stop does not wait for a model that is still loading."""
    may_load = threading.Event()

    def load() -> FakeEngine:
        may_load.wait()  # without an end of its own: the daemon has to end first
        return FakeEngine()

    with RunningDaemon(load, wait_until_ready=False) as daemon:
        wait_until(lambda: scrape(daemon.url, "machd_state", state="loading") == 1, "it loads")
        daemon.stop()
        has_ended = daemon.join(CEILING_S)
        may_load.set()
        assert has_ended
    # The model came too late; the thread that loaded it ends in peace.
    wait_until(
        lambda: "machd-engine" not in {thread.name for thread in threading.enumerate()},
        "the engine thread ends",
    )


def test_the_address_is_free_again_after_the_end() -> None:
    """A daemon can be followed at once by another on the same port."""
    with RunningDaemon() as first, RawClient(first.url) as client:
        client.post_json(_CHAT, chat("hi", max_tokens=2))
        assert client.read_answer().status == 200
        port = httpx.URL(first.url).port
        first.stop()
        assert first.join(CEILING_S)
        with RunningDaemon(flags={"server.port": port}) as second:
            assert second.url == first.url
            assert httpx.get(f"{second.url}/health/ready").status_code == 200


# --- where it listens -------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Yield where a socket file can lie; the system allows about a hundred characters."""
    chosen = tmp_path / "s"
    assert len(str(chosen)) < 100
    yield chosen
    chosen.unlink(missing_ok=True)


def _unix_flags(path: Path) -> dict[str, object]:
    return {"server.host": f"unix:{path}"}


def test_a_unix_socket_serves_its_owner_alone(path: Path) -> None:
    """The socket file has mode 0600, serves streams, and is gone after the end."""
    with RunningDaemon(lambda: FakeEngine(told), _unix_flags(path)) as daemon:
        assert daemon.url == f"unix:{path}"
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost"
        ) as client:
            assert client.get("/health/ready").status_code == 200
            answer = client.post(_CHAT, json=chat("say through a file", stream=True))
            assert sse_text(answer.content) == "through a file"
            assert client.get("/health", headers={"Host": "evil.example"}).status_code == 421
    assert not path.exists()


def test_a_stale_unix_socket_is_replaced(path: Path) -> None:
    """A socket file that a killed daemon left behind does not keep the next one from starting."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    assert path.exists()
    with RunningDaemon(flags=_unix_flags(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_a_unix_socket_in_use_is_left_alone(path: Path) -> None:
    """A second daemon does not take the socket of a first one that still serves."""
    with RunningDaemon(flags=_unix_flags(path)):
        with pytest.raises(ListenError), RunningDaemon(flags=_unix_flags(path)):
            pass
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost"
        ) as client:
            assert client.get("/health/ready").status_code == 200


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    """A file at the socket's path is an error, and stays as it was."""
    path.write_text("precious")
    with pytest.raises(ListenError), RunningDaemon(flags=_unix_flags(path)):
        pass
    assert path.read_text() == "precious"


def test_a_unix_socket_needs_its_directory(tmp_path: Path) -> None:
    """A path in a directory that does not exist is an error that names it."""
    missing = tmp_path / "no" / "s"
    with pytest.raises(ListenError, match="unix:"), RunningDaemon(flags=_unix_flags(missing)):
        pass


def test_a_taken_port_is_an_error_that_says_what_to_do() -> None:
    """The message names the address and the flag that chooses another."""
    with RunningDaemon() as first:
        port = httpx.URL(first.url).port
        with (
            pytest.raises(ListenError, match=rf"127\.0\.0\.1:{port}.*--port"),
            RunningDaemon(flags={"server.port": port}),
        ):
            pass
        assert httpx.get(f"{first.url}/health/ready").status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_beyond_loopback_keys_are_required(host: str) -> None:
    """An address that others can reach is refused without keys; the message says what is missing."""
    if ":" in host and not _has_ipv6_loopback():
        pytest.skip("this machine has no IPv6")
    with (
        pytest.raises(ListenError, match=r"auth\.api_keys_file"),
        RunningDaemon(flags={"server.host": host}),
    ):
        pass


@pytest.mark.parametrize("host", ["192.0.2.1", "machd.invalid"])
def test_an_address_that_is_not_ours_is_an_error(host: str) -> None:
    """An address of another machine, or an unknown host name, is an error of listening."""
    with pytest.raises(ListenError), RunningDaemon(flags={"server.host": host}):
        pass


def test_an_address_of_another_machine_cannot_be_listened_on(tmp_path: Path) -> None:
    """With keys, an address that is not ours is still an error, and not a traceback."""
    keys = tmp_path / "keys"
    keys.write_text("alice:k-0123456789abcdef\n")
    flags = {"server.host": "192.0.2.1", "auth.api_keys_file": str(keys)}
    with pytest.raises(ListenError, match=r"192\.0\.2\.1"), RunningDaemon(flags=flags):
        pass


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2", "::1"])
def test_every_loopback_address_needs_no_key(host: str) -> None:
    """Loopback in all its spellings is served without keys."""
    if host == "::1" and not _has_ipv6_loopback():
        pytest.skip("this machine has no IPv6 loopback")
    if host == "127.0.0.2" and not _can_bind(host):
        pytest.skip("this machine's loopback is one address")
    with RunningDaemon(flags={"server.host": host}) as daemon:
        assert httpx.get(f"{daemon.url}/health/ready").status_code == 200


def _has_ipv6_loopback() -> bool:
    return socket.has_ipv6 and _can_bind("::1")


def _can_bind(host: str) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
