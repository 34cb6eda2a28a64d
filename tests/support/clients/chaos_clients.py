"""Clients that behave and clients that do not, many at once on one event loop, all of it seeded."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import httpx

from support.clients.raw_client import RawAnswer
from support.engines.dialogue import sse_data

_CHAT = "/v1/chat/completions"
_COMPLETIONS = "/v1/completions"
_LETTERS = "etaoin shrdlu,.ETAOINSHRDLU0123456789"

Answer = tuple[tuple[str, str], ...]
"""Text and finish reason of each choice."""


class Conduct(Enum):
    """A client's way with its request."""

    READ = "read"
    READ_SLOWLY = "read_slowly"
    LEAVE_IN_BODY = "leave_in_body"
    LEAVE_AT_ONCE = "leave_at_once"
    LEAVE_SOON = "leave_soon"
    LEAVE_IN_STREAM = "leave_in_stream"
    LEAVE_AT_END = "leave_at_end"

    @property
    def leaves(self) -> bool:
        """Return whether the client leaves before the end of the answer."""
        return self.name.startswith("LEAVE")


@dataclass(frozen=True)
class Errand:
    """One client's request and conduct.

    Attributes:
        body: As it goes over the wire.
        request: Which of the valid requests it is; None for one that is to be refused.
        status: What a client that stays is to be answered.
        patience: A share of whatever the conduct waits for: bytes, events or time.
        resets: Leaves by RST instead of FIN.
    """

    path: str
    body: bytes
    conduct: Conduct = Conduct.READ
    request: int | None = None
    status: int = 200
    patience: float = 0.5
    resets: bool = False


def valid_requests(count: int, rng: random.Random) -> list[tuple[str, dict[str, object]]]:
    """Paths and bodies of requests that have one right answer: greedy, or with a seed."""
    return [_valid_request(number, rng) for number in range(count)]


def _valid_request(number: int, rng: random.Random) -> tuple[str, dict[str, object]]:
    length = rng.choice([1, 3, 8, 20, 60, 150, 400])
    text = "".join(rng.choices(_LETTERS, k=length))
    fields: dict[str, object] = {
        "model": "tiny-llama",
        "stream": rng.random() < 0.7,
        "max_tokens": rng.choice([1, 2, 5, 12, 24]),
        "temperature": 0.0 if rng.random() < 0.5 else rng.choice([0.6, 1.0, 1.6]),
        "seed": rng.randrange(2**31),
    }
    optional: list[dict[str, object]] = [
        {"top_p": 0.8},
        {"top_k": 12},
        {"min_p": 0.03},
        {"frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"repetition_penalty": 1.3},
        {"logit_bias": {"65": 3.0, "66": -50.0}},
        {"stop": ["e", "zz"]},
        {"n": 2},
        {"ignore_eos": True},
    ]
    for extra in rng.sample(optional, rng.randrange(3)):
        fields |= extra
    if number % 2:
        return _CHAT, {"messages": [{"role": "user", "content": text}], **fields}
    return _COMPLETIONS, {"prompt": text, **fields}


_INVALID: list[tuple[int, bytes]] = [
    (400, b'{"model": "tiny-llama", "prompt": "x", '),
    (400, b"\xff\xfe not JSON"),
    (400, b"[" * 5000),
    (400, b'{"model": "tiny-llama", "prompt": 7}'),
    (400, b'{"model": "tiny-llama", "prompt": "x", "max_tokens": "7"}'),
    (400, b'{"model": "tiny-llama", "prompt": "x", "temperature": -1}'),
    (400, b'{"model": "tiny-llama", "prompt": [128]}'),
    (400, b'{"model": "tiny-llama", "prompt": "x", "logit_bias": {"128": 1}}'),
    (400, b'{"model": "tiny-llama", "prompt": "x", "n": 1000}'),
    (400, json.dumps({"model": "tiny-llama", "prompt": "too long " * 200}).encode()),
    (413, json.dumps({"model": "tiny-llama", "prompt": "x" * 30_000}).encode()),
]
"""Bodies to be refused, with their statuses."""

_LEAVING = [one for one in Conduct if one.leaves]


def errands(
    requests: Sequence[tuple[str, Mapping[str, object]]], count: int, rng: random.Random
) -> list[list[Errand]]:
    """Some errands in groups that set out together; most groups are of one.

    Two in five leave, evenly in each of the ways; one in ten is to be refused, one in twenty reads
    slowly, and one in five belongs to a group of the same request.
    """
    groups: list[list[Errand]] = []
    total = 0
    while total < count:
        if rng.random() < 0.06:
            number = rng.randrange(len(requests))
            group = [_errand(requests, number, rng) for _ in range(min(4, count - total))]
        elif rng.random() < 0.11:
            status, body = rng.choice(_INVALID)
            group = [Errand(_COMPLETIONS, body, status=status)]
        else:
            group = [_long(_errand(requests, rng.randrange(len(requests)), rng), rng)]
        groups.append(group)
        total += len(group)
    return groups


def _errand(
    requests: Sequence[tuple[str, Mapping[str, object]]], number: int, rng: random.Random
) -> Errand:
    path, fields = requests[number]
    body = json.dumps(fields).encode()
    errand = Errand(path, body, request=number, patience=rng.random(), resets=rng.random() < 0.5)
    draw = rng.random()
    if draw < 0.06:
        return replace(errand, conduct=Conduct.READ_SLOWLY)
    if draw < 0.5:
        return replace(errand, conduct=rng.choice(_LEAVING))
    return errand


def _long(errand: Errand, rng: random.Random) -> Errand:
    """The same errand, for a prompt and an answer long enough to leave in the midst of them."""
    if errand.conduct not in (Conduct.LEAVE_SOON, Conduct.LEAVE_IN_STREAM):
        return errand
    is_soon = errand.conduct is Conduct.LEAVE_SOON
    fields = {
        "model": "tiny-llama",
        "prompt": "".join(rng.choices(_LETTERS, k=800 if is_soon else 10)),
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
    }
    return replace(errand, path=_COMPLETIONS, body=json.dumps(fields).encode())


def answer_of(answer: RawAnswer) -> Answer:
    """Texts and finish reasons, streamed or not; raises if the answer is not whole."""
    assert answer.status == 200, answer
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return tuple(
            (_text(choice), str(choice["finish_reason"])) for choice in answer.json()["choices"]
        )
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in sse_data(answer.body):
        assert "error" not in event, f"an error in a stream: {event}"
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + _text(choice)
            if choice["finish_reason"] is not None:
                assert index not in reasons, "a choice ended twice"
                reasons[index] = choice["finish_reason"]
    return tuple((texts[index], reasons[index]) for index in sorted(texts))


def _text(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("delta", choice.get("message")).get("content") or "")


class Town:
    """All clients of one daemon."""

    def __init__(self, url: str, *, max_clients: int) -> None:
        """Begin without connections; at most ``max_clients`` are open at once."""
        target = httpx.URL(url)
        self._address = (target.host, target.port)
        self._doors = asyncio.Semaphore(max_clients)

    async def run(
        self, groups: Sequence[Sequence[Errand]]
    ) -> list[tuple[Errand, RawAnswer | None]]:
        """All errands, each with its answer; None for a client that left or was to leave."""

        async def one(group: Sequence[Errand]) -> list[tuple[Errand, RawAnswer | None]]:
            return list(await asyncio.gather(*(self._run(errand) for errand in group)))

        return [pair for pairs in await asyncio.gather(*map(one, groups)) for pair in pairs]

    async def _run(self, errand: Errand) -> tuple[Errand, RawAnswer | None]:
        slow = errand.conduct is Conduct.READ_SLOWLY
        async with self._doors, self._connection(errand, slow=slow) as (reader, writer):
            writer.write(self._request(errand))
            await writer.drain()
            match errand.conduct:
                case Conduct.READ:
                    return errand, _parsed(await reader.read())
                case Conduct.READ_SLOWLY:
                    return errand, _parsed(await _read_slowly(reader))
                case Conduct.LEAVE_IN_BODY | Conduct.LEAVE_AT_ONCE:
                    pass
                case Conduct.LEAVE_SOON:
                    await asyncio.sleep(0.3 * errand.patience)
                case Conduct.LEAVE_IN_STREAM:
                    await _read_events(reader, 1 + int(8 * errand.patience))
                case Conduct.LEAVE_AT_END:
                    await _read_until_end(reader)
            return errand, None

    @asynccontextmanager
    async def _connection(
        self, errand: Errand, *, slow: bool
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        plug = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        plug.setblocking(False)  # noqa: FBT003 - the library has no name for it
        if slow:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        await asyncio.get_running_loop().sock_connect(plug, self._address)
        reader, writer = await asyncio.open_connection(sock=plug, limit=1024 if slow else 65_536)
        try:
            yield reader, writer
        finally:
            if errand.conduct.leaves and errand.resets:
                plug = writer.get_extra_info("socket")
                plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def _request(self, errand: Errand) -> bytes:
        head = (
            f"POST {errand.path} HTTP/1.1\r\nHost: {self._address[0]}:{self._address[1]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(errand.body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        whole = head.encode() + errand.body
        if errand.conduct is Conduct.LEAVE_IN_BODY:
            return whole[: int(len(whole) * errand.patience)]
        return whole


async def _read_slowly(reader: asyncio.StreamReader) -> bytes:
    received = b""
    while data := await reader.read(256):
        received += data
        await asyncio.sleep(0.01)
    return received


async def _read_events(reader: asyncio.StreamReader, count: int) -> None:
    """Read until so many events have come, or the end."""
    received = b""
    while received.count(b"data: ") < count and (data := await reader.read(4096)):
        received += data


async def _read_until_end(reader: asyncio.StreamReader) -> None:
    """Read until a choice has ended, though not to the end of the answer if it is streamed."""
    received = b""
    while b'"finish_reason":"' not in received and (data := await reader.read(512)):
        received += data


def _parsed(received: bytes) -> RawAnswer:
    head, _, rest = received.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if "content-length" in headers:
        assert len(rest) == int(headers["content-length"]), "the body is cut short"
        return RawAnswer(int(status_line.split()[1]), headers, rest)
    body = b""
    length = -1
    while length:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        assert len(rest) >= length + 2, "the body is cut short"
        body += rest[:length]
        rest = rest[length + 2 :]
    return RawAnswer(int(status_line.split()[1]), headers, body)
