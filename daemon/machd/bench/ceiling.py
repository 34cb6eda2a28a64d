"""The model without a server, in a process of its own: what it is asked, and who keeps it.

It has a process of its own because the matrix library must be chosen before mlx is imported and
because its memory must not count as the server's. One JSON object a line in both directions: the
process says :class:`CeilingReady` when the model is loaded, then answers every
:class:`CeilingQuery` (the bare loop) with a :class:`CeilingAnswer` and every :class:`StaticQuery`
(a batch of mlx-lm's) with a :class:`StaticAnswer`, or says :class:`CeilingFailure` and ends. It
also ends when its standard input does, so that it cannot outlive the bench.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from machd.bench.model_facts import ModelFacts
from machd.errors import EngineFaultError, MachdError, StartupError

_MODULE = "machd.cli.ceiling_process"
_MAX_LINE_BYTES = 64 * 2**20
_JOIN_S = 10.0


class CeilingReady(Struct, frozen=True, tag="ready"):
    """The model is loaded.

    Attributes:
        model: What it is.
        weights_bytes: What its weights take.
        available_memory_bytes: What is left where it computes.
    """

    model: ModelFacts
    weights_bytes: int
    available_memory_bytes: int

    @property
    def leaves_room_for_server(self) -> bool:
        """Whether a server could load the weights once more, with half as much again to work in."""
        return self.available_memory_bytes >= self.weights_bytes * 1.5


class CeilingQuery(Struct, frozen=True, tag="bare"):
    """Prefill these prompts in one call, then make so many steps.

    The loop knows rows of one length only: each prompt is brought to their mean length, so that
    the work is that of the prompts as they are.
    """

    prompts: list[str]
    steps: int


class CeilingAnswer(Struct, frozen=True, tag="answer"):
    """Seconds; see ``machd.engine.ceiling.CeilingReading``."""

    batch_width: int
    prompt_tokens: int
    prefill_s: float
    step_s: list[float]


class StaticQuery(Struct, frozen=True, tag="static"):
    """Run these prompts as one batch of mlx-lm's ``batch_generate``, to its end."""

    prompts: list[str]
    max_tokens: int


class StaticAnswer(Struct, frozen=True, tag="batch"):
    """Tokens of each prompt and of each completion, in the order of the prompts."""

    prompt_tokens: list[int]
    completion_tokens: list[int]


class CeilingFailure(Struct, frozen=True, tag="failure"):
    """An operating error, as :class:`machd.errors.MachdError` has it."""

    message: str
    exit_code: int


ModelQuery: TypeAlias = CeilingQuery | StaticQuery
CeilingReply: TypeAlias = CeilingReady | CeilingAnswer | StaticAnswer | CeilingFailure
_Answer = TypeVar("_Answer", CeilingAnswer, StaticAnswer)


class CeilingProcess:
    """Starts the process when it is first needed, and again after :meth:`close`."""

    def __init__(self, args: Sequence[str]) -> None:
        """Prepare; nothing runs yet.

        Args:
            args: Settings as flags: those the server gets, so that both load the same model.
        """
        self._args = tuple(args)
        self._process: asyncio.subprocess.Process | None = None
        self._decoder: msgspec.json.Decoder[CeilingReply] = msgspec.json.Decoder(CeilingReply)
        self.ready: CeilingReady | None = None

    async def measure(self, query: CeilingQuery) -> CeilingAnswer:
        """Run the bare loop once. Raises as :meth:`run_batch`."""
        return await self._ask(query, CeilingAnswer)

    async def run_batch(self, query: StaticQuery) -> StaticAnswer:
        """Run one batch to its end.

        Raises:
            StartupError: The model cannot be loaded.
            EngineFaultError: The process failed.
        """
        return await self._ask(query, StaticAnswer)

    async def close(self) -> None:
        """End the process and give its memory back."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_JOIN_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _ask(self, query: ModelQuery, kind: type[_Answer]) -> _Answer:
        process = self._process or await self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(query) + b"\n")
            await process.stdin.drain()
        except OSError as error:
            raise EngineFaultError("the bare loop's process has ended") from error
        reply = await self._receive(process)
        assert isinstance(reply, kind), "a query is answered in its kind"
        return reply

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _MODULE, *self._args),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
        reply = await self._receive(process)
        assert isinstance(reply, CeilingReady), "the first line says that the model is loaded"
        self.ready = reply
        return process

    async def _receive(self, process: asyncio.subprocess.Process) -> CeilingReply:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            code = await process.wait()
            raise EngineFaultError(f"the bare loop's process ended with exit code {code}")
        reply = self._decoder.decode(line)
        if isinstance(reply, CeilingFailure):
            raise _error(reply)
        return reply


def _error(failure: CeilingFailure) -> MachdError:
    kind = StartupError if failure.exit_code == StartupError.exit_code else EngineFaultError
    return kind(failure.message)
