"""``machd serve`` as a process of its own, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import psutil
from msgspec import Struct

from machd.clock import Clock
from machd.errors import EngineFaultError, StartupError

_OVERRIDES = (
    *("--host", "127.0.0.1", "--port", "0", "--admin-listen", "off"),
    *("--logging-format", "json", "--logging-level", "info"),
    *("--auth-api-keys-file", ""),  # it listens on loopback, for this client alone
)
_MAX_LINE_BYTES = 2**20
_KEPT_LINES = 20
_STOP_S = 30.0
_ENGINE_MODULE = "machd.cli.engine"
_MEASURING_MODULE = "machd_probes.worker"
_MEASURING_POLL_S = 0.2
_FAULT_LEVELS = frozenset({"error", "critical"})


class _LogLine(Struct):
    event: str = ""
    level: str = ""
    url: str = ""
    problem: str = ""
    exception: str = ""


@dataclass(slots=True)
class ServeProcess:
    """A daemon that takes requests at ``url``."""

    process: asyncio.subprocess.Process
    url: str = ""
    start_to_ready_s: float = 0.0
    ready_rss_bytes: int = 0
    was_killed: bool = False
    said: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    def terminate(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    async def end_within(self, timeout_s: float) -> None:
        """Wait for the end of a process that was told to stop; kill it after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.process.wait()
        except TimeoutError:
            self.was_killed = True
            await self.kill()

    async def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def measured(self, max_s: float, clock: Clock) -> None:
        """Wait until no process of the daemon's measures its model: on a first start one does, and takes a core.

        Args:
            max_s: Time after which it is left to go on.
            clock: Reads time.
        """
        end_s = clock.monotonic_s() + max_s
        while clock.monotonic_s() < end_s:
            if not self.is_measuring():
                return
            await asyncio.sleep(_MEASURING_POLL_S)

    def is_measuring(self) -> bool:
        """Return whether a process of the daemon's measures its model."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
            return any(_MEASURING_MODULE in _command_line(child) for child in children)
        return False

    def rss_bytes(self) -> int:
        """Resident memory of the front and its engine process right now; pages that they share count twice.

        Raises:
            EngineFaultError: The process has ended.
        """
        try:
            front = psutil.Process(self.process.pid)
            engines = [one for one in front.children() if _ENGINE_MODULE in _command_line(one)]
            return sum(int(one.memory_info().rss) for one in (front, *engines))
        except psutil.NoSuchProcess:
            raise EngineFaultError(f"the server has ended: {self.last_words}") from None

    @property
    def last_words(self) -> str:
        """The last lines that it wrote for a person, and the last faults of its log."""
        return "\n".join(self.said) or "it said nothing"

    async def follow(self, ready: asyncio.Future[str]) -> None:
        """Read the log to its end, so that the daemon never waits for a full pipe."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            try:
                log_line = msgspec.json.decode(line, type=_LogLine)
            except msgspec.DecodeError:  # not of the log: what a person would be told
                self.said.append(line.decode("utf-8", "replace").strip().removeprefix("machd: "))
                continue
            if log_line.level in _FAULT_LEVELS:
                why = log_line.problem or log_line.exception.rstrip().rpartition("\n")[2]
                self.said.append(f"{log_line.event}: {why}" if why else log_line.event)
            if log_line.event == "daemon.ready" and not ready.done():
                ready.set_result(log_line.url)
        code = await self.process.wait()
        if not ready.done() and code == StartupError.exit_code:
            ready.set_exception(StartupError(self.last_words))
        elif not ready.done():
            message = f"the server ended with exit code {code}: {self.last_words}"
            ready.set_exception(EngineFaultError(message))


@asynccontextmanager
async def serve(args: Sequence[str], clock: Clock) -> AsyncIterator[ServeProcess]:
    """Start a daemon with settings as flags, and stop it as a supervisor would.

    Where it listens and what it logs is the bench's to say.

    Raises:
        StartupError: It refused what it was told; the message is its own.
        EngineFaultError: It ended for another reason, or did not leave with exit code 0.
    """
    started_s = clock.monotonic_s()
    process = ServeProcess(
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "machd", "serve", *args, *_OVERRIDES),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
        )
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    follower = asyncio.create_task(process.follow(ready))
    try:
        process.url = await ready
        process.start_to_ready_s = clock.monotonic_s() - started_s
        process.ready_rss_bytes = process.rss_bytes()
        yield process
        if not process.was_killed:
            process.terminate()
            await process.end_within(_STOP_S)
            if process.was_killed:
                raise EngineFaultError(f"the server did not stop within {_STOP_S:g} s")
    finally:
        await process.kill()
        await asyncio.wait({follower})
    code = process.process.returncode
    if code != 0 and not process.was_killed:
        raise EngineFaultError(f"the server stopped with exit code {code}: {process.last_words}")


def _command_line(process: psutil.Process) -> list[str]:
    """Return its command line; nothing of a process that has just ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
