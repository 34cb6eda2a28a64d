"""A worker as the runner sees it: a process that is started, listened to and ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from machd_probes.worker_messages import WorkerMessage, decode_message

_MAX_LINE_BYTES = 2**24
_KEPT_BYTES = 4096
_KEPT_LINES = 2


class WorkerProcess:
    """A context manager: inside it the worker runs; outside it and its children are gone."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Prepare; nothing runs yet.

        Args:
            command: The whole command line.
            environ: Its whole environment.
        """
        self._command = tuple(command)
        self._environ = dict(environ)
        self._process: asyncio.subprocess.Process | None = None
        self._listener: asyncio.Task[None] | None = None
        self._said = b""

    async def __aenter__(self) -> Self:
        """Start it, in a session of its own: Ctrl-C is the runner's to handle."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environ,
            limit=_MAX_LINE_BYTES,
            start_new_session=True,
        )
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """End it at once, whatever it does; a worker has nothing to put in order."""
        assert self._process is not None, "entered"
        assert self._listener is not None, "entered"
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._listener.cancel()
        await asyncio.wait({self._listener})
        await self._process.wait()

    async def message(self, limit_s: float) -> WorkerMessage | None:
        """The next message, lines that are none left out; None when the worker has ended.

        Raises:
            TimeoutError: None came within ``limit_s`` seconds.
        """
        assert self._process is not None, "entered"
        assert self._process.stdout is not None, "a pipe"
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    line = await self._process.stdout.readline()
                except ValueError:  # longer than any message
                    continue
                if not line:
                    return None
                message = decode_message(line)
                if message is not None:
                    return message

    async def end(self, limit_s: float) -> str:
        """Wait for the exit, and describe it with the last lines of output."""
        assert self._process is not None, "entered"
        assert self._listener is not None, "entered"
        try:
            async with asyncio.timeout(limit_s):
                code = await self._process.wait()
                await asyncio.shield(self._listener)
        except TimeoutError:
            return "it closed its output and went on running"
        lines = self._said.decode("utf-8", "replace").split("\n")
        words = "\n".join([line for line in lines if line.strip()][-_KEPT_LINES:])
        return f"{_how(code)}: {words}" if words else _how(code)

    async def _listen(self) -> None:
        """Read what it says to people, so that it never waits for a full pipe."""
        assert self._process is not None, "entered"
        assert self._process.stderr is not None, "a pipe"
        while part := await self._process.stderr.read(_KEPT_BYTES):
            self._said = (self._said + part)[-_KEPT_BYTES:]


def _how(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it crashed with {name}"
