"""What a stranger sends to the ZMQ endpoints has bounds, and costs no subscriber an event."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs
from support.clocks.polling import CEILING_S, wait_until
from support.programs.kv_subscriber import KvSubscriber

from machd.clock import SystemClock
from machd.errors import ListenError
from machd.kv_events import zmtp
from machd.kv_events.listener import MAX_CONNECTIONS
from machd.kv_events.publisher import KvEventPublisher
from machd.link.block_events import BlockStored

_GREETING = (b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL").ljust(64, b"\0")
_ENOUGH_BYTES = 16_777_216
"""What a sender without bounds gets rid of; the buffers of both sockets hold less."""


@pytest.fixture(name="publisher")
def _publisher() -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher(
        "tcp://127.0.0.1:0", SystemClock(), replay_endpoint="tcp://127.0.0.1:0", topic="kv"
    )
    yield publisher
    publisher.close(within_s=CEILING_S)


def _connect(endpoint: str | None, source: str = "127.0.0.1") -> socket.socket:
    assert endpoint is not None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), CEILING_S, (source, 0))


def _ready(socket_type: bytes) -> bytes:
    body = b"\x05READY\x0bSocket-Type" + len(socket_type).to_bytes(4, "big") + socket_type
    return bytes((4, len(body))) + body


def _frame(flags: int, body: bytes, size: int | None = None) -> bytes:
    """A frame in the long form, of which ``size`` may say something else than its length."""
    return bytes((flags | 2,)) + (len(body) if size is None else size).to_bytes(8, "big") + body


def _endless(chosen: random.Random, socket_type: bytes) -> Callable[[], bytes]:
    """Return what makes one more piece of what has no end."""
    name = chosen.choice([b"PING", b"SUBSCRIBE", b"CANCEL", b"READY", b"ERROR", b"", b"\xff" * 40])
    before = chosen.choice([b"", _GREETING, _GREETING + _ready(socket_type)])
    pieces: list[Callable[[], bytes]] = [
        lambda: _frame(1, chosen.randbytes(chosen.randint(0, 900))),  # parts of one message
        lambda: _frame(0, chosen.choice([b"\1", b"\0", b""]) + chosen.randbytes(900)),
        lambda: _frame(4, bytes((len(name),)) + name + chosen.randbytes(900)),
        lambda: _frame(chosen.choice([0, 1, 4]), chosen.randbytes(10_000), size=2**62),
        lambda: chosen.randbytes(10_000),
    ]
    piece = chosen.choice(pieces)
    begun = iter([before])
    return lambda: next(begun, b"") + b"".join(piece() for _ in range(20))


def _taken_bytes(connection: socket.socket, piece: Callable[[], bytes]) -> int:
    """Send until the other end takes no more for a while, or has closed; returns what it took."""
    connection.settimeout(0.2)
    taken = 0
    with contextlib.suppress(OSError):
        while taken < _ENOUGH_BYTES:
            taken += connection.send(piece())
    return taken


def _check_served(publisher: KvEventPublisher, number: int) -> None:
    """Another subscriber gets an event, live and again."""
    with KvSubscriber(publisher.endpoint, publisher.replay_endpoint, topic="kv") as subscriber:

        def heard() -> bool:
            publisher.put(BlockStored((number,), None, (number, number), 2))
            return subscriber._events.poll(20) > 0

        wait_until(heard, "the subscription")
        first = publisher._next_sequences[""] - 1
        assert subscriber._replay.send_multipart([b"", first.to_bytes(8, "big")]) is None
        assert subscriber._replay.poll(int(CEILING_S * 1000)), "the replay comes"


@pytest.mark.parametrize("is_replay", [False, True], ids=["events", "replay"])
def test_a_peer_that_sends_without_end_is_not_read_without_end(
    publisher: KvEventPublisher, *, is_replay: bool
) -> None:
    """Frames, parts, commands, subscriptions and noise: little of them is taken, and others are served."""
    endpoint = publisher.replay_endpoint if is_replay else publisher.endpoint
    with contextlib.ExitStack() as strangers:
        for seed in range(24):
            piece = _endless(random.Random(seed), b"DEALER" if is_replay else b"SUB")
            stranger = strangers.enter_context(_connect(endpoint))
            assert _taken_bytes(stranger, piece) < _ENOUGH_BYTES, f"seed {seed}"
        _check_served(publisher, 1)


def test_a_peer_that_stops_halfway_keeps_its_place_for_the_handshake_only(
    publisher: KvEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of a handshake it has sent, and whatever it says instead of one, it is closed."""
    monkeypatch.setattr(zmtp, "HANDSHAKE_S", 0.2)
    whole = _GREETING + _ready(b"SUB")
    chosen = random.Random(0)
    parts = [whole[: chosen.randrange(len(whole))] for _ in range(20)]
    others = [
        b"GET / HTTP/1.1\r\n\r\n".ljust(64, b"\n"),
        b"\xff" + bytes(8) + b"\x7f\x01" + bytes(53),  # ZMTP 2
        _GREETING.replace(b"NULL", b"PLAI"),
        _GREETING + _ready(b"PUSH"),
        _GREETING + _ready(b""),
        _GREETING + b"\x04\x00",
        _GREETING + b"\x04\x06\x05READY",
        _GREETING + b"\x00\x06\x05READY",
        _GREETING + b"\x04\x09\x05READY\xffab",
    ]
    for sent in parts + others:
        with _connect(publisher.endpoint) as stranger:
            stranger.sendall(sent)
            while stranger.recv(65_536):
                pass
    _check_served(publisher, 1)


def test_connections_beyond_the_bound_are_closed(publisher: KvEventPublisher) -> None:
    """Those that are there stay, and the log says that one was refused."""
    with (
        capture_logs() as lines,
        KvSubscriber(publisher.endpoint, topic="kv") as subscriber,
        contextlib.ExitStack() as strangers,
    ):

        def heard() -> bool:
            publisher.put(BlockStored((1,), None, (1, 1), 2))
            return subscriber._events.poll(20) > 0

        wait_until(heard, "the subscription")
        crowd = [
            strangers.enter_context(_connect(publisher.endpoint))
            for _ in range(3 * MAX_CONNECTIONS)
        ]
        wait_until(lambda: sum(map(_is_closed, crowd)) > 2 * MAX_CONNECTIONS, "the others")
        assert sum(map(_is_closed, crowd)) == 2 * MAX_CONNECTIONS + 1
        while subscriber._events.poll(20):
            subscriber._events.recv_multipart()
        wait_until(heard, "the next event")
    refused = [one for one in lines if one["event"] == "kv_events.connection_refused"]
    assert [one["connections"] for one in refused] == [MAX_CONNECTIONS]


def test_one_machine_with_many_connections_keeps_no_other_one_out(
    publisher: KvEventPublisher,
) -> None:
    """The newest of its connections makes room."""
    try:
        _connect(publisher.endpoint, "127.0.0.2").close()
    except OSError:
        pytest.skip("this system has one loopback address")
    with contextlib.ExitStack() as strangers:
        crowd = [
            strangers.enter_context(_connect(publisher.endpoint, "127.0.0.2"))
            for _ in range(MAX_CONNECTIONS)
        ]
        wait_until(lambda: len(publisher._events._hosts) == MAX_CONNECTIONS, "all of them")
        _check_served(publisher, 1)
        assert _is_closed(crowd[-1])
        assert not any(map(_is_closed, crowd[:-2]))


def _is_closed(connection: socket.socket) -> bool:
    """Return True if the other end has closed."""
    connection.settimeout(0)
    try:
        while data := connection.recv(65_536):
            assert data
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (zmq.SUB, {}),
        (zmq.XSUB, {}),
        (zmq.SUB, {zmq.HEARTBEAT_IVL: 20, zmq.HEARTBEAT_TIMEOUT: 500}),
    ],
    ids=["sub", "xsub", "heartbeats"],
)
def test_subscribers_of_libzmq_get_events(
    publisher: KvEventPublisher, kind: int, options: dict[int, int]
) -> None:
    """Each of its sockets that subscribe, with what it sends beside; what is cancelled comes no more."""
    with zmq.Context() as context, context.socket(kind) as subscriber:
        subscriber.linger = 0
        for name, value in options.items():
            subscriber.setsockopt(name, value)
        subscriber.connect(publisher.endpoint)

        def subscribe(prefix: bytes, *, wanted: bool) -> None:
            if kind == zmq.XSUB:
                subscriber.send(bytes((wanted,)) + prefix)
            else:
                subscriber.setsockopt(zmq.SUBSCRIBE if wanted else zmq.UNSUBSCRIBE, prefix)

        def has_event() -> bool:
            publisher.put(BlockStored((1,), None, (1, 1), 2))
            return subscriber.poll(20) > 0

        subscribe(b"other", wanted=True)
        subscribe(b"k", wanted=True)
        wait_until(has_event, "an event")
        topic, sequence, payload = subscriber.recv_multipart()
        assert topic == b"kv"
        assert len(sequence) == 8
        assert payload
        for _ in range(5):
            wait_until(has_event, "the connection stands")
            subscriber.recv_multipart()


def test_a_request_socket_is_answered(publisher: KvEventPublisher) -> None:
    """REQ, as vLLM's example asks: its first answer is the first batch that it asked for."""
    publisher.put(BlockStored((1,), None, (1, 1), 2))
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.linger = 0
        assert publisher.replay_endpoint is not None
        asking.connect(publisher.replay_endpoint)
        wait_until(lambda: publisher._next_sequences[""] > 0, "a batch")
        asking.send((0).to_bytes(8, "big"))
        assert asking.poll(int(CEILING_S * 1000))
        assert asking.recv_multipart()[0] == bytes(8)


def test_a_subscriber_of_zmtp_3_0_is_understood(publisher: KvEventPublisher) -> None:
    """It subscribes by messages, where ZMTP 3.1 has commands."""
    with _connect(publisher.endpoint) as subscriber:
        subscriber.sendall(_GREETING + _ready(b"SUB") + b"\x00\x03\x01kv")
        received = b""

        def heard() -> bool:
            nonlocal received
            publisher.put(BlockStored((1,), None, (1, 1), 2))
            subscriber.settimeout(0.02)
            with contextlib.suppress(TimeoutError):
                received += subscriber.recv(65_536)
            return b"BlockStored" in received

        wait_until(heard, "an event")


def test_a_second_daemon_takes_no_socket_from_the_first(tmp_path: Path) -> None:
    """A path that is served is refused; one that was left behind is taken over."""
    endpoint = f"ipc://{tmp_path}/e"
    first = KvEventPublisher(endpoint, SystemClock())
    with pytest.raises(ListenError, match=r"kv_events\.endpoint: cannot listen on unix:"):
        KvEventPublisher(endpoint, SystemClock())
    first.close(within_s=CEILING_S)
    assert not (tmp_path / "e").exists()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "e"))
    KvEventPublisher(endpoint, SystemClock()).close(within_s=CEILING_S)


@pytest.mark.parametrize("host", ["*", "[::1]", "[::]", "localhost"])
def test_addresses_are_those_of_zmq(host: str) -> None:
    """Every address, IPv6 and loopback's name; the port that was taken is told."""
    if ":" in host and not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    publisher = KvEventPublisher(f"tcp://{host}:0", SystemClock())
    assert not publisher.endpoint.endswith(":0")
    publisher.close(within_s=CEILING_S)
