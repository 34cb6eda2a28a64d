"""Many requests to an encoder from clients that keep their connections: all shapes and lengths, and some clients leave."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from random import Random

import httpx

_LEAVES = 1 / 50
"""Share of requests whose client leaves before the answer."""

_WORDS = ("time", "year", "people", "way", "day", "man", "life", "child", "a", "i", "at", "on")
_MEDIAN_WORDS = 4
_MAX_TEXTS = 6
_MAX_IDS = 12
_LARGEST_ID = 40
"""Every vocabulary has more tokens than that."""

LEFT = 0
"""Stands for a status where the client has left."""


class EncoderLoad:
    """Sends requests for vectors, and counts what came of them.

    Attributes:
        outcomes: Requests by status; :data:`LEFT` for those whose client left.
    """

    def __init__(self, url: str, *, clients: int = 6) -> None:
        """Prepare; nothing is sent yet."""
        self._url = httpx.URL(url)
        self._clients = clients
        self.outcomes = Counter[int]()

    def run(self, requests: int, *, seed: int) -> None:
        """Send so many requests, and wait for the answers."""
        asyncio.run(self._run(requests, seed))

    async def _run(self, requests: int, seed: int) -> None:
        numbers = iter(range(requests))
        async with asyncio.TaskGroup() as group:
            for client in range(self._clients):
                group.create_task(self._ask_on(numbers, Random(seed * 1000 + client)))

    async def _ask_on(self, numbers: Iterator[int], random: Random) -> None:
        """Ask on one connection as long as there are numbers, and open another one after leaving."""
        reader, writer = await self._connect()
        for _ in numbers:
            request = self._request(random)
            if random.random() < _LEAVES:
                await _leave(writer, request, random)
                self.outcomes[LEFT] += 1
                reader, writer = await self._connect()
                continue
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            await reader.readexactly(int(fields[b"content-length"]))
            self.outcomes[int(head.split(b" ", 2)[1])] += 1
        writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._url.host, self._url.port)

    def _request(self, random: Random) -> bytes:
        body = json.dumps(_fields(random)).encode()
        head = (
            f"POST /v1/embeddings HTTP/1.1\r\nHost: {self._url.host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


async def _leave(writer: asyncio.StreamWriter, request: bytes, random: Random) -> None:
    """Send a request, or half of it, and go without an answer."""
    writer.write(request[: random.choice((len(request), len(request) // 2))])
    await writer.drain()
    await asyncio.sleep(random.choice((0.0, 0.001, 0.004)))
    writer.transport.abort()


def _fields(random: Random) -> dict[str, object]:
    fields: dict[str, object] = {"truncate": random.random() < 0.9}
    if random.random() < 0.5:
        fields["encoding_format"] = "base64"
    count, shape = random.randint(1, _MAX_TEXTS), random.random()
    if shape < 0.5:
        fields["input"] = _text(random)
    elif shape < 0.75:
        fields["input"] = [_text(random) for _ in range(count)]
    elif shape < 0.8:
        fields["input"] = [_text(random)] * count
    elif shape < 0.95:
        fields["input"] = [_ids(random) for _ in range(count)]
    else:  # is refused
        fields["input"], fields["dimensions"] = _text(random), random.choice((0, 10**6))
    return fields


def _text(random: Random) -> str:
    words = 1 + int(random.lognormvariate(0, 0.8) * _MEDIAN_WORDS)
    return " ".join((*random.choices(_WORDS, k=words), str(random.randrange(10_000))))


def _ids(random: Random) -> list[int]:
    return [random.randrange(1, _LARGEST_ID) for _ in range(random.randint(1, _MAX_IDS))]
