"""Answers to requests whose body is refused, for clients that write all of it before they read."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.clients.raw_client import RawClient
from support.clocks.polling import CEILING_S, wait_until
from support.daemon.connection_ages import ConnectionAges
from support.daemon.running_daemon import RunningDaemon

from machd.clock import SystemClock

_CHAT = "/v1/chat/completions"
_MIB = 1_048_576
_KEY = "a-key-of-forty-characters-or-so-0123456789"
_ATTEMPTS = 5
_STALL_S = 30.0
"""The default of limits.client_stall_timeout_s."""

_REFUSED = {
    "400 framing": (_CHAT, {"Content-Length": "1", "Transfer-Encoding": "chunked"}, 400),
    "401": (_CHAT, {"Authorization": "Bearer wrong"}, 401),
    "403": (_CHAT, {"Origin": "https://chat.example.org"}, 403),
    "404": ("/nowhere", {}, 404),
    "405": ("/v1/models", {}, 405),
    "413": (_CHAT, {}, 413),
    "415": (_CHAT, {"Content-Type": "text/plain"}, 415),
    "421": (_CHAT, {"Host": "llm.example.org"}, 421),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon that asks for a key and takes bodies of 2 MiB."""
    keys = Path(tmp_path_factory.mktemp("keys")) / "keys"
    keys.write_text(f"client:{_KEY}\n")
    keys.chmod(0o600)
    with RunningDaemon(flags={"auth.api_keys_file": str(keys)}) as running:
        yield running


def _send(client: RawClient, name: str, body: bytes, *, closes: bool, chunked: bool) -> None:
    path, headers, _ = _REFUSED[name]
    if chunked:
        body = b"".join(
            b"%x\r\n%s\r\n" % (len(piece), piece)
            for piece in (body[at : at + 65_536] for at in range(0, len(body), 65_536))
        )
    client.request(
        "POST",
        path,
        body + (b"0\r\n\r\n" if chunked else b""),
        {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {_KEY}",
            **({"Transfer-Encoding": "chunked", "Content-Length": ""} if chunked else {}),
            **({"Connection": "close"} if closes else {}),
            **headers,
        },
    )


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "chunked"])
@pytest.mark.parametrize("closes", [False, True], ids=["keep-alive", "close"])
@pytest.mark.parametrize("name", _REFUSED)
def test_refusal_reaches_a_client_that_writes_before_it_reads(
    daemon: RunningDaemon,
    name: str,
    closes: bool,  # noqa: FBT001
    chunked: bool,  # noqa: FBT001
) -> None:
    """The answer comes, whole, to a client that sends a large body in one go and then looks."""
    for _ in range(_ATTEMPTS):
        with RawClient(daemon.url, receive_buffer_bytes=4096) as client:
            _send(client, name, b"a" * (3 * _MIB), closes=closes, chunked=chunked)
            client.half_close()
            answer = client.read_answer() if name != "400 framing" else None
            if answer is None:
                assert client.read_to_end().startswith(b"HTTP/1.1 400 ")
            else:
                assert answer.status == _REFUSED[name][2]


def test_refusal_reaches_urllib(daemon: RunningDaemon) -> None:
    """Python's own client sends ``Connection: close`` and the whole body first, and reads the 413."""
    for _ in range(_ATTEMPTS):
        asked = urllib.request.Request(
            f"{daemon.url}{_CHAT}",
            data=b"a" * (8 * _MIB),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {_KEY}"},
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(asked)
        assert caught.value.code == 413
        caught.value.close()


def test_refusal_of_64_mib_leaves_the_memory_alone(daemon: RunningDaemon) -> None:
    """A refused body is dropped while it is read, however large it is."""
    before_bytes = psutil.Process().memory_info().rss
    with RawClient(daemon.url) as client:
        client.request("POST", "/nowhere", b"", {"Content-Length": str(63 * _MIB)})
        half = 63 * _MIB // 2 // 65_536
        for _ in range(half):
            client.send(b"a" * 65_536)
        grown_bytes = psutil.Process().memory_info().rss - before_bytes
        for _ in range(half):
            client.send(b"a" * 65_536)
        client.send(b"a" * (63 * _MIB - 2 * half * 65_536))
        assert client.read_answer().status == 404
    assert grown_bytes < 16 * _MIB


@pytest.mark.parametrize("closes", [False, True], ids=["keep-alive", "close"])
def test_refused_body_has_an_end_in_bytes(
    daemon: RunningDaemon,
    closes: bool,  # noqa: FBT001
) -> None:
    """A client that sends for ever loses its connection after a bounded number of bytes."""
    sent_bytes = 0
    piece = b"a" * 65_536
    with RawClient(daemon.url) as client:
        client.request(
            "POST",
            "/nowhere",
            b"",
            {"Content-Length": str(1 << 40), **({"Connection": "close"} if closes else {})},
        )
        with suppress(ConnectionError):
            while sent_bytes < 256 * _MIB:
                client.send(piece)
                sent_bytes += len(piece)
    assert 63 * _MIB < sent_bytes < 80 * _MIB


@pytest.mark.parametrize("closes", [False, True], ids=["keep-alive", "close"])
def test_refused_body_that_drips_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
    closes: bool,  # noqa: FBT001
) -> None:
    """Sending a byte now and then holds a refused connection no longer than limits.client_stall_timeout_s."""
    ages = ConnectionAges(monkeypatch)
    clock, aged_s = SystemClock(), 0.0
    with RunningDaemon() as daemon, RawClient(daemon.url) as client:
        _begin_refused(client, closes=closes)
        begun_s = clock.monotonic_s()

        def has_ended() -> bool:
            nonlocal aged_s
            ages.advance(_STALL_S / 30)
            aged_s += _STALL_S / 30
            return _is_reset(client)

        wait_until(has_ended, "the connection is closed")
        waited_s = clock.monotonic_s() - begun_s
    assert aged_s + waited_s >= _STALL_S, "a client that is still sending has that long"


def test_closed_connection_does_not_wait_for_a_quiet_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that neither sends nor closes after its last answer is closed before a stall is."""
    ages = ConnectionAges(monkeypatch)
    with RunningDaemon() as daemon, RawClient(daemon.url) as client:
        _begin_refused(client, closes=True)
        client.read_to_end()
        assert not _is_reset(client), "what a client still sends is read for a while"
        ages.advance(_STALL_S / 4)
        wait_until(lambda: _is_reset(client), "the connection is closed")


def test_refused_body_does_not_delay_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is told to stop waits for no client that is still sending a refused body."""
    monkeypatch.setattr("machd.http.server._GRACE_S", 3600)
    with RunningDaemon() as daemon, RawClient(daemon.url) as first, RawClient(daemon.url) as second:
        _begin_refused(first, closes=True)
        _begin_refused(second, closes=False)
        daemon.stop()
        assert daemon.join(CEILING_S)


def test_broken_chunk_is_answered_and_its_request_let_go(daemon: RunningDaemon) -> None:
    """A body whose chunks cannot be read gets its 400, and its handler waits for no more of it."""
    with RawClient(daemon.url) as client:
        _, headers, _ = _REFUSED["413"]
        client.request(
            "POST",
            _CHAT,
            b"3\r\nabc\r\nno chunk\r\n" + b"a" * (3 * _MIB),
            {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {_KEY}",
                "Content-Length": "",
                "Transfer-Encoding": "chunked",
                **headers,
            },
        )
        assert client.read_to_end().startswith(b"HTTP/1.1 400 ")


def _is_reset(client: RawClient) -> bool:
    """Send one more byte; whether the daemon has closed its side for good."""
    try:
        client.send(b"a")
    except ConnectionError:
        return True
    return False


def _begin_refused(client: RawClient, *, closes: bool) -> None:
    """Send a part of a large body that is refused, and read the answer."""
    client.request(
        "POST",
        "/nowhere",
        b"a" * 1000,
        {"Content-Length": "1000000", **({"Connection": "close"} if closes else {})},
    )
    assert client.read_answer().status == 404
