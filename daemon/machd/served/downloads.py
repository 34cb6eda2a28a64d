"""Downloads of models that operators ask a running daemon for: one at a time, in a process of its own.

The process is `machd model pull --json`: it can be ended at any moment and leaves what the next one goes on from, and
neither its network nor its hashing touches the event loop. Several clients may follow one download; when the last of them
leaves it is stopped.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog
from msgspec import structs

from machd.engine.protocol.downloads import (
    Downloaded,
    DownloadEvent,
    DownloadFailed,
    DownloadOrder,
    DownloadPlanned,
    DownloadProgress,
)
from machd.errors import (
    ConflictError,
    DrainingError,
    FaultError,
    MachdError,
    ModelDownloadError,
    OperatorAbortError,
)
from machd.settings.model import Settings

PULL_COMMAND = (sys.executable, "-P", "-m", "machd", "model", "pull", "--json")
_LEAVE_S = 1.0
"""How long another order waits for the end of a download: that its last client has left is noticed within that."""

_END_S = 5.0
"""How long the process may take to end before it is killed."""

OnPulled = Callable[[Downloaded], Awaitable[None]]
"""Called when a model is on this machine, before the clients hear of it; a MachdError says why it is not served."""


async def _serve_nothing(_done: Downloaded) -> None:
    """Leave what was fetched to the next start."""


def check_online(settings: Settings) -> None:
    """Raise ConflictError where the daemon may not download."""
    if settings.model.offline:
        raise ConflictError(
            "model.offline is true, so this server fetches nothing: set it to false and restart, or run "
            "`machd model pull ORG/NAME` on its machine"
        )


@dataclass(frozen=True, slots=True)
class DownloadState:
    """How far the download of now is; sizes are 0 until the hub has told them."""

    model: str
    total_bytes: int
    completed_bytes: int


class Downloads:
    """Fetches models. Lives on the event loop."""

    def __init__(
        self,
        on_pulled: OnPulled = _serve_nothing,
        command: Sequence[str] = PULL_COMMAND,
    ) -> None:
        """Begin without any.

        Args:
            on_pulled: What is done with a model that is on this machine now.
            command: Of the program, which gets the order as its last arguments.
        """
        self._on_pulled = on_pulled
        self._command = command
        self._running: _Running | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    @property
    def state(self) -> DownloadState | None:
        """The download of now; None where there is none."""
        running = self._running
        if running is None:
            return None
        total_bytes = 0 if running.planned is None else running.planned.total_bytes
        return DownloadState(running.order.model, total_bytes, running.completed_bytes)

    async def follow(self, order: DownloadOrder) -> DownloadWatch:
        """Begin a download, or follow the one of the same order; one that is about to end is waited for.

        Raises:
            ConflictError: Another one is running.
            DrainingError: The daemon stops.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                while self._running is not None and self._running.order != order:
                    await self._running.is_forgotten.wait()
        if self._is_stopped:
            raise DrainingError("the server is shutting down")
        running = self._running
        if running is None:
            running = _Running(order, self._command, self._on_pulled, self._forget)
            self._running = running
            self._tasks.add(running.task)
            running.task.add_done_callback(self._tasks.discard)
        elif running.order != order:
            raise ConflictError(
                f"{running.order.model} is being fetched, and downloads go one at a time"
            )
        return running.watch()

    def cancel(self) -> str | None:
        """Stop the download of now; returns its model, None where nothing comes any more. What has come stays."""
        running = self._running
        if running is None or running.is_here:
            return None
        running.end()
        return running.order.model

    async def stop(self) -> None:
        """Stop the download of now, wait until every process has ended, and begin no other.

        A model that has come is served by the next start: taking it on may hang in the file system.
        """
        self._is_stopped = True
        if self._running is not None:
            self._running.end()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _forget(self, running: _Running) -> None:
        running.is_forgotten.set()
        if self._running is running:
            self._running = None


class DownloadWatch:
    """What one client hears of a download."""

    def __init__(self, leave: Callable[[DownloadWatch], None]) -> None:
        self._leave = leave
        self._news: deque[DownloadEvent] = deque()
        self._has_news = asyncio.Event()

    def push(self, event: DownloadEvent) -> None:
        """Tell it; progress that the client has not heard of yet gives way to newer progress of the same file."""
        last = self._news[-1] if self._news else None
        if (
            isinstance(last, DownloadProgress)
            and isinstance(event, DownloadProgress)
            and last.file == event.file
        ):
            self._news.pop()
        self._news.append(event)
        self._has_news.set()

    async def events(self, idle_s: float) -> AsyncIterator[DownloadEvent]:
        """Give what happens up to the end, the last news again after each silence of ``idle_s``."""
        last: DownloadEvent | None = None
        while not isinstance(last, Downloaded | DownloadFailed):
            with suppress(TimeoutError):
                async with asyncio.timeout(idle_s):
                    await self._has_news.wait()
            if self._news:
                last = self._news.popleft()
            if not self._news:
                self._has_news.clear()
            if last is not None:
                yield last

    def close(self) -> None:
        """Hear no more."""
        self._leave(self)


class _Running:
    """One download and its process.

    Attributes:
        is_here: All of it has come, and the model is about to be served; clients that leave stop nothing.
        is_forgotten: Another one may begin.
    """

    def __init__(
        self,
        order: DownloadOrder,
        command: Sequence[str],
        on_pulled: OnPulled,
        forget: Callable[[_Running], None],
    ) -> None:
        self.order = order
        self._forget = forget
        self.planned: DownloadPlanned | None = None
        self.completed_bytes = 0
        self.is_here = False
        self.is_forgotten = asyncio.Event()
        self._command = [
            *command,
            *(f"--include={pattern}" for pattern in order.include),
            f"{order.model}@{order.revision}",
        ]
        self._on_pulled = on_pulled
        self._watches: list[DownloadWatch] = []
        self._last: DownloadEvent | None = None
        self._is_wanted = True
        self._log = structlog.get_logger("machd.models")
        self._log.info("model.downloading", model=order.model, revision=order.revision)
        self.task = asyncio.create_task(self._run())

    def watch(self) -> DownloadWatch:
        """Have one more client follow it."""
        watch = DownloadWatch(self._leave)
        for event in (self.planned, self._last):
            if event is not None:
                watch.push(event)
        self._watches.append(watch)
        return watch

    def end(self) -> None:
        """End it, however far it is."""
        if self._is_wanted:
            self._is_wanted = False
            self._forget(self)  # the next one of this model waits for the process of this one
            self.task.cancel()

    def _leave(self, watch: DownloadWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)
        if not self._watches and not self.is_here:
            self.end()

    async def _run(self) -> None:
        fault: Exception | None = None
        try:
            ending = await self._fetched()
        except asyncio.CancelledError:
            ending = DownloadFailed(
                code=OperatorAbortError.code,
                message="the download was stopped; what has come is kept, and the next one goes on from there",
            )
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            ending = DownloadFailed(
                code=ModelDownloadError.code, message=f"the download has failed: {error}"
            )
        except Exception as error:  # noqa: BLE001 - a bug of machd's: the clients still need an ending
            fault = error
            ending = DownloadFailed(
                code=FaultError.code, message="the download has failed; the log says why"
            )
        finally:
            self._is_wanted = False
            self._forget(self)
        if isinstance(ending, DownloadFailed):
            self._log.warning(
                "model.download_failed",
                model=self.order.model,
                error=ending.message,
                exc_info=fault,
            )
        self._tell(ending)

    async def _fetched(self) -> Downloaded | DownloadFailed:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # its last line on standard output says the same
            start_new_session=True,  # a terminal's Ctrl-C is for the daemon
        )
        try:
            assert process.stdout is not None, "asked for"
            async for line in process.stdout:
                event = msgspec.json.decode(line, type=DownloadEvent)
                if isinstance(event, DownloadFailed):
                    return event
                if isinstance(event, Downloaded):
                    return await self._served(event)
                self._note(event)
            code = await process.wait()
            return DownloadFailed(
                code=ModelDownloadError.code,
                message=f"the download ended with the exit code {code}; `machd model pull` shows why",
            )
        finally:
            # No cancellation leaves a process behind; its end has a bound of its own.
            ended = asyncio.create_task(_ended(process))
            while not ended.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(ended)
            ended.result()

    async def _served(self, done: Downloaded) -> Downloaded:
        self.is_here = True
        self._log.info(
            "model.downloaded", model=done.model, revision=done.revision, bytes=done.total_bytes
        )
        try:
            await self._on_pulled(done)
        except MachdError as error:
            return structs.replace(done, note=f"it is here, and not served yet: {error}")
        except Exception:  # noqa: BLE001 - as above
            self._log.exception("settings.change_failed")
            return structs.replace(done, note="it is here, and not served yet: the log says why")
        return done

    def _note(self, event: DownloadEvent) -> None:
        if isinstance(event, DownloadPlanned):
            self.planned, self.completed_bytes = event, event.completed_bytes
        elif isinstance(event, DownloadProgress):
            self.completed_bytes = event.all_completed_bytes
        self._tell(event)

    def _tell(self, event: DownloadEvent) -> None:
        self._last = event if not isinstance(event, DownloadPlanned) else None
        for watch in self._watches:
            watch.push(event)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End a process that goes on: asked first, then killed."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
