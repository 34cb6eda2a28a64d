"""A small server of the OpenAI API that runs any number of streams at once, with its tempo and gaps.

What ``machd bench --url`` meets at other people's: fields that are refused, usage that is not sent,
no capabilities, connections that are closed after each answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class FakeOpenAi:
    """Its ways, and the requests that it got.

    Attributes:
        step_s: Between two tokens of a stream.
        word_s: For each word of a prompt, before the first token.
        stalls: Whether a prompt that is being read stops every stream.
        refuses: Fields of a body that it answers with 400.
        has_completions: Whether it knows another endpoint than chat.
        sends_usage: Whether it counts tokens where ``stream_options`` asks for it.
        coalesces: Whether an identical request that is open makes another its follower.
        keeps_schemas: Whether an answer with ``response_format`` begins as one of an array.
        schema_step_s: More between two tokens of any stream while one with a schema is open.
        max_tokens: Where every answer ends, whatever was asked for.
        asked: Path and body of every request.
    """

    step_s: float = 0.002
    word_s: float = 0.0
    stalls: bool = False
    refuses: frozenset[str] = frozenset()
    has_completions: bool = True
    sends_usage: bool = True
    coalesces: bool = False
    keeps_schemas: bool = False
    schema_step_s: float = 0.0
    max_tokens: int = 10_000
    asked: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    _open: dict[bytes, int] = field(default_factory=dict)
    _guided: int = 0
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve at the URL that is given, below a prefix."""
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}/llm/v1"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            path = head.split()[1]
            length = head.partition("content-length: ")[2].partition("\r\n")[0]
            body = await reader.readexactly(int(length or 0))
            await self._answer(path, body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/llm/v1/models":
            _head(writer, 200)
            writer.write(b'{"data":[{"id":"first"},{"id":"second"}]}')
            return
        if not path.endswith("completions"):
            _head(writer, 404)
            return
        fields = json.loads(body)
        self.asked.append((path.removeprefix("/llm"), fields))
        if ("/chat/" not in path and not self.has_completions) or self.refuses & fields.keys():
            _head(writer, 400)
            return
        is_follower = self.coalesces and self._open.get(body, 0) > 0
        is_guided = "response_format" in fields
        self._open[body] = self._open.get(body, 0) + 1
        self._guided += is_guided
        try:
            await self._stream(writer, fields, is_follower=is_follower)
        finally:
            self._open[body] -= 1
            self._guided -= is_guided

    async def _stream(
        self, writer: asyncio.StreamWriter, fields: dict[str, object], *, is_follower: bool
    ) -> None:
        _head(writer, 200, "X-Coalesced: leader\r\n" if is_follower else "")
        text = str(fields.get("prompt") or fields.get("messages"))
        words = len(text.split())
        asked = fields["max_tokens"]
        assert isinstance(asked, int)
        tokens = min(asked, self.max_tokens)
        if self.stalls:
            async with self._reading:
                await asyncio.sleep(words * self.word_s)
        else:
            await asyncio.sleep(words * self.word_s)
        token = b"[" if self.keeps_schemas and "response_format" in fields else b"x"
        for _ in range(tokens):
            writer.write(b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % token)
            await writer.drain()
            await asyncio.sleep(self.step_s + self.schema_step_s * (self._guided > 0))
            async with self._reading:
                pass
        if self.sends_usage and "stream_options" in fields:
            usage = {"prompt_tokens": words, "completion_tokens": tokens}
            writer.write(b"data: %b\n\n" % json.dumps({"choices": [], "usage": usage}).encode())
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()


def _head(writer: asyncio.StreamWriter, status: int, more: str = "") -> None:
    """Without a length: the end of the connection is the end of the answer."""
    head = f"HTTP/1.1 {status} Said\r\nConnection: close\r\n{more}\r\n"
    writer.write(head.encode())
