"""A daemon whose guarantees are measured, and what starts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from machd.bench.client import CompletionClient
from machd.bench.connection import Connection, Exchange, ServerAddress
from machd.bench.guarantees.guarantee import GIVE_UP_S
from machd.bench.server import ServerProcess
from machd.bench.sse import TimedPiece
from machd.bench.target import Target
from machd.bench.timing import RequestTiming
from machd.clock import Clock
from machd.errors import EngineFaultError

_STREAM_TOKENS = 4096
_PROMPT = "Once upon a time there was"


@dataclass(slots=True)
class Stream:
    """A completion that runs until it is cancelled.

    Attributes:
        began: Set at the first piece of its answer.
    """

    began: asyncio.Event = field(default_factory=asyncio.Event)

    def on_piece(self, _piece: TimedPiece) -> None:
        """Note that the answer has begun."""
        self.began.set()


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon that takes requests and has answered one."""

    process: ServerProcess
    target: Target
    clock: Clock

    def connection(self) -> Connection:
        """A connection of its own; the caller closes it."""
        return self.target.connection(self.clock)

    async def ask(self, method: str, path: str, body: bytes = b"") -> Exchange:
        """Send one request on a new connection and read the answer, whatever its status.

        Raises:
            EngineFaultError: The connection broke, or no answer came within ``GIVE_UP_S``.
        """
        async with aclosing(self.connection()) as connection:
            try:
                return await connection.exchange(method, path, body, timeout_s=GIVE_UP_S)
            except OSError as error:
                message = f"{path}: the daemon left a request unanswered: {error}"
                raise EngineFaultError(message) from error

    async def answer(self, max_tokens: int) -> RequestTiming:
        """One short completion.

        Raises:
            EngineFaultError: There was none.
        """
        async with aclosing(CompletionClient(self.target, self.clock)) as client:
            return await client.complete(_PROMPT, max_tokens)

    @asynccontextmanager
    async def streaming(self, count: int) -> AsyncIterator[list[asyncio.Task[RequestTiming]]]:
        """Run long completions; the first has begun on entry, and the rest are cancelled on exit.

        Raises:
            EngineFaultError: All ended before any of them began.
        """
        stream = Stream()
        tasks = [
            asyncio.create_task(self._stream(f"{number} {_PROMPT}", stream))
            for number in range(count)
        ]
        began = asyncio.create_task(stream.began.wait())
        try:
            await asyncio.wait({began, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not stream.began.is_set():
                    task.result()  # raises what ended it
            yield tasks
        finally:
            for one in (*tasks, began):
                one.cancel()
            await asyncio.gather(*tasks, began, return_exceptions=True)

    async def _stream(self, prompt: str, stream: Stream) -> RequestTiming:
        async with aclosing(CompletionClient(self.target, self.clock)) as client:
            return await client.complete(prompt, self._stream_tokens, on_piece=stream.on_piece)

    @property
    def has_chat(self) -> bool:
        """Return whether the model has a chat template."""
        capabilities = self.target.capabilities
        return capabilities is not None and capabilities.features.chat

    @property
    def _stream_tokens(self) -> int:
        capabilities = self.target.capabilities
        assert capabilities is not None, "machd says what it is"
        return min(_STREAM_TOKENS, capabilities.model.context_tokens // 2)


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts daemons.

    Attributes:
        serve_args: Settings as flags.
    """

    serve_args: tuple[str, ...]
    clock: Clock

    @asynccontextmanager
    async def serving(self, *args: str) -> AsyncIterator[Daemon]:
        """A daemon that has answered something.

        Args:
            args: More settings; they count for more than ``serve_args``.

        Raises:
            StartupError: The model cannot be served.
            EngineFaultError: The daemon failed, or did not leave with exit code 0.
        """
        async with ServerProcess((*self.serve_args, *args), self.clock) as process:
            address = ServerAddress.of(process.url)
            target = await Target.find(address, clock=self.clock)
            yield Daemon(process, target, self.clock)
