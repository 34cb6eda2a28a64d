"""``machd serve`` as a process of its own, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
import psutil
from msgspec import Struct

from machd.clock import Clock
from machd.errors import EngineFaultError, MachdError, StartupError

_OVERRIDES = (
    *("--host", "127.0.0.1", "--port", "0", "--admin-listen", "off"),
    *("--logging-format", "json", "--logging-level", "info"),
    *("--auth-api-keys-file", ""),  # it listens on loopback, for this client alone
)
_MAX_LINE_BYTES = 2**20
_KEPT_LINES = 20
_STOP_S = 30.0


class _LogLine(Struct):
    event: str = ""
    url: str = ""


class ServerProcess:
    """A context manager: inside it the server takes requests at ``url``."""

    def __init__(self, args: Sequence[str], clock: Clock) -> None:
        """Prepare; nothing runs yet.

        Args:
            args: Settings as flags; where it listens and what it logs is the bench's to say.
            clock: Reads time.
        """
        self._args = tuple(args)
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._follower: asyncio.Task[None] | None = None
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._was_killed = False
        self.url = ""
        self.start_to_ready_s = 0.0
        self.ready_rss_bytes = 0

    async def __aenter__(self) -> Self:
        """Start, and wait until requests are taken.

        Raises:
            StartupError: The server refused what it was told; the message is its own.
            EngineFaultError: It ended for another reason.
        """
        started_s = self._clock.monotonic_s()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "machd", "serve", *self._args, *_OVERRIDES),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._follower = asyncio.create_task(self._follow(self._process, ready))
        try:
            self.url = await ready
        except BaseException:
            await self._kill()
            raise
        self.start_to_ready_s = self._clock.monotonic_s() - started_s
        self.ready_rss_bytes = self.rss_bytes()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Stop as a supervisor would, unless ``end_within`` has killed it.

        Raises:
            EngineFaultError: The server did not leave with exit code 0; not raised on top of
                another error.
        """
        assert self._process is not None, "entered"
        if kind is not None:
            await self._kill()
            return
        if self._was_killed:
            return
        self.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                code = await self._process.wait()
        except TimeoutError:
            await self._kill()
            raise EngineFaultError(f"the server did not stop within {_STOP_S:g} s") from None
        except asyncio.CancelledError:
            await self._kill()  # whoever cancels waits no longer for it
            raise
        await self._join_follower()
        if code != 0:
            raise EngineFaultError(f"the server stopped with exit code {code}: {self._last_words}")

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        assert self._process is not None, "entered"
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def end_within(self, timeout_s: float) -> None:
        """Wait for the end of a process that was told to stop; kill it after ``timeout_s``."""
        assert self._process is not None, "entered"
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self._was_killed = True
            await self._kill()

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self._process is not None, "entered"
        return self._process.pid

    def rss_bytes(self) -> int:
        """Resident memory right now, pages shared with other processes included."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            raise EngineFaultError(f"the server has ended: {self._last_words}") from None

    @property
    def _last_words(self) -> str:
        return "\n".join(self._said) or "it said nothing"

    async def _follow(
        self, process: asyncio.subprocess.Process, ready: asyncio.Future[str]
    ) -> None:
        """Read the log to its end, so that the server never waits for a full pipe."""
        assert process.stderr is not None
        async for line in process.stderr:
            try:
                log_line = msgspec.json.decode(line, type=_LogLine)
            except msgspec.DecodeError:
                # Not of the log: what a person would be told.
                if text := line.decode("utf-8", "replace").strip():
                    self._said.append(text.removeprefix("machd: "))
                continue
            if log_line.event == "daemon.ready" and not ready.done():
                ready.set_result(log_line.url)
        code = await process.wait()
        if not ready.done():
            ready.set_exception(self._failure(code))

    def _failure(self, code: int) -> MachdError:
        if code == StartupError.exit_code:
            return StartupError(self._last_words)
        return EngineFaultError(f"the server ended with exit code {code}: {self._last_words}")

    async def _kill(self) -> None:
        assert self._process is not None, "entered"
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._join_follower()

    async def _join_follower(self) -> None:
        assert self._follower is not None, "entered"
        await asyncio.wait({self._follower})
