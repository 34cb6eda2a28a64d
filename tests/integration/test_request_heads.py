"""Heads that are too long, strange or broken are answered in the envelope of the client's dialect."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import httpx
import pytest
from support.clients.raw_client import RawAnswer, RawClient
from support.daemon.running_daemon import RunningDaemon

_MAX_HEAD_BYTES = 16_384
_PATHS = ["/v1/chat/completions", "/v1/messages", "/api/chat", "/nowhere"]


@pytest.fixture(name="daemon", scope="module")
def _daemon() -> Iterator[RunningDaemon]:
    with RunningDaemon(flags={"admin.listen": "127.0.0.1:0"}) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def _serves_others_meanwhile(daemon: RunningDaemon) -> Iterator[None]:
    """Another client's connection is served before and after."""
    body = {"model": "fake", "prompt": "hi", "max_tokens": 1}
    with httpx.Client(base_url=daemon.url) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        yield
        assert client.post("/v1/completions", json=body).status_code == 200


def _answer(url: str, sent: bytes, piece_bytes: int | None = None) -> RawAnswer:
    """Send bytes, in pieces of a size, and read the answer."""
    with RawClient(url) as client:
        step = piece_bytes or len(sent)
        try:
            for begin in range(0, len(sent), step):
                client.send(sent[begin : begin + step])
        except ConnectionError:
            pass  # refused and closed already; the answer is still to be read
        return client.read_answer()


def _check_envelope(path: str, answer: RawAnswer) -> None:
    """The body is an error as the dialect at the path has it, with the request's id in a header."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    if path.startswith("/api"):
        assert isinstance(error, str)
        return
    assert error["message"]
    if "/messages" in path:
        assert answer.json()["type"] == "error"
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


def _head(path: str, length: int, chosen: random.Random) -> bytes:
    """A request with a head of exactly so many bytes, which are spent in different ways."""
    end = b"\r\n\r\n"
    start = f"GET {path} HTTP/1.1\r\nHost: localhost".encode()
    room = length - len(start) - len(end)
    match chosen.choice(["one header", "short headers", "blanks", "query"]):
        case "one header":
            return start + b"\r\nX-A: " + b"a" * (room - 7) + end
        case "short headers":
            return start + b"\r\na:b" * (room // 5) + b"b" * (room % 5) + end
        case "blanks":
            return start + b"\r\nX-A: " + b" " * (room - 8) + b"a" + end
        case _:
            return start.replace(b" HTTP", b"?" + b"q" * (room - 1) + b" HTTP") + end


@pytest.mark.parametrize("seed", range(24))
def test_a_head_beyond_the_bound_is_refused_by_one_byte(daemon: RunningDaemon, seed: int) -> None:
    """In one write or in many, whatever it is full of; up to the bound it is read."""
    chosen = random.Random(seed)
    path = chosen.choice(_PATHS)
    length = chosen.choice([_MAX_HEAD_BYTES, _MAX_HEAD_BYTES + 1, 70_000, 200_000])
    head = _head(path, length, chosen)
    assert len(head) == length
    answer = _answer(daemon.url, head, chosen.choice([None, None, 1000]))
    _check_envelope(path, answer)
    if length > _MAX_HEAD_BYTES:
        assert answer.status == 400
        assert b"16384 bytes" in answer.body
        assert answer.headers["connection"] == "close"
    else:
        assert answer.status in {404, 405}


def test_the_admin_listener_refuses_in_its_own_envelope(daemon: RunningDaemon) -> None:
    """The same bound holds there."""
    assert daemon.admin_url is not None
    answer = _answer(daemon.admin_url, _head("/admin/status", 200_000, random.Random(0)))
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("trailer", [b"a:b\r\n" * 40_000, b"A: " + b"a" * 200_000 + b"\r\n"])
def test_trailers_have_the_same_bound(daemon: RunningDaemon, trailer: bytes) -> None:
    """A chunked body may end with headers; too many of them are refused."""
    head = (
        "POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        "Content-Type: application/json\r\n\r\n2\r\n{}\r\n0\r\n"
    )
    answer = _answer(daemon.url, head.encode() + trailer + b"\r\n")
    assert answer.status == 400
    _check_envelope("/v1/messages", answer)


@pytest.mark.parametrize("scheme", ["http", "HTTP", "https"])
@pytest.mark.parametrize("authority", ["127.0.0.1", "127.0.0.1:8080", "localhost:1", "[::1]:80"])
def test_a_target_in_absolute_form_is_served(
    daemon: RunningDaemon, scheme: str, authority: str
) -> None:
    """Its host counts, and not the header's."""
    target = f"{scheme}://{authority}/v1/models?x=1"
    sent = f"GET {target} HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    answer = _answer(daemon.url, sent.encode())
    assert answer.status == 200
    assert answer.json()["data"]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://evil.example/v1/models", 421),
        ("http://user@127.0.0.1/v1/models", 421),
        ("http:///v1/models", 421),
        ("http://127.0.0.1:99999999/v1/models", 421),
        ("http://[::1/v1/models", 421),
        ("http://127.0.0.1/nowhere", 404),
        ("https://127.0.0.1/v1/models#a", 400),
        ("http://127.0.0.1/v1/messages/http://127.0.0.1/v1/models", 404),
        ("ftp://127.0.0.1/v1/models", 400),
        ("127.0.0.1:8080", 400),
        ("*", 404),
        ("v1/models", 400),
        ("//127.0.0.1/v1/models", 404),
        ("?", 400),
        ("#", 400),
        ("/%", 404),
        ("/%00", 404),
        ("/%ff%fe", 404),
        ("/v1/models%0d%0aX-A:b", 404),
        ("/v1/%2e%2e/v1/models", 404),
        ("/v1/models/../models/..", 404),
        ("/" + "a" * 5000, 404),
        ("http://127.0.0.1:8080 /v1/models", 400),
        ("/\x7f", 400),
        ("/a b", 400),
        ("/é", 400),
        ("", 400),
    ],
)
def test_a_strange_target_is_refused_in_the_envelope(
    daemon: RunningDaemon, target: str, status: int
) -> None:
    """No form of a target is a fault, or an answer of the framework's."""
    answer = _answer(daemon.url, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert answer.status == status
    _check_envelope("/messages" if "/v1/messages" in target else "", answer)


@pytest.mark.parametrize(
    "head",
    [
        b"HEAD foo HTTP/1.1\r\nHost: a\r\n\r\n",
        b"HEAD / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_wrong_with_a_head_request_is_told_without_a_body(
    daemon: RunningDaemon, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is closed in order: nothing is raised where data arrive."""
    with RawClient(daemon.url) as client:
        client.send(head)
        received = client.read_to_end()
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.endswith(b"\r\n\r\n")
    assert [one for one in caplog.records if one.name == "asyncio"] == []


_WHOLE = (
    b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
)


def _damaged(chosen: random.Random) -> bytes:
    """A request with some bytes changed, taken out, put in or repeated."""
    sent = bytearray(_WHOLE)
    for _ in range(chosen.randint(1, 4)):
        at = chosen.randrange(len(sent))
        match chosen.randrange(4):
            case 0:
                sent[at] = chosen.randrange(256)
            case 1:
                del sent[at : at + chosen.randint(1, 5)]
            case 2:
                sent[at:at] = chosen.choice([b"\r\n", b"\0", b" ", b"\n", b"\xff", b":", b"-5\r\n"])
            case _:
                sent[at:at] = sent[at : at + chosen.randint(1, 30)]
    return bytes(sent)


def test_damaged_requests_are_answered_in_an_envelope_or_not_at_all(daemon: RunningDaemon) -> None:
    """Of 150, each; what is still a request may be one that is refused for its fields."""
    answered = 0
    for seed in range(150):
        sent = _damaged(random.Random(seed))
        with RawClient(daemon.url) as client:
            client.send(sent)
            client.half_close()
            received = client.read_to_end()
        for part in received.split(b"HTTP/1.1 ")[1:]:
            if part.startswith(b"102 ") or b"\r\n\r\n" not in part:
                continue
            head, _, body = part.partition(b"\r\n\r\n")
            assert not part.startswith(b"5"), f"seed {seed}: {part!r}"
            assert b"content-type: application/json" in head.lower(), f"seed {seed}: {part!r}"
            assert "error" in json.loads(body), f"seed {seed}: {part!r}"
            answered += 1
    assert answered > 75


def test_a_broken_chunk_after_the_refusal_closes_the_connection(daemon: RunningDaemon) -> None:
    """The answer was given before; there is no second one."""
    with RawClient(daemon.url) as client:
        client.send(
            b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
        )
        assert client.read_answer().status == 404
        received = len(client.received)
        client.send(b"-5\r\n")
        assert len(client.read_to_end()) == received
