"""The stream of overviews: each is made once for all watchers, and only while there are any."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

import msgspec
from msgspec import Struct

from machd.errors import TooManyInFlightError
from machd.http.sse import event_frame
from machd.process.lifecycle import State
from machd.telemetry.log_ring import LogRing

MAX_WATCHERS = 8
"""Watchers at once; a watcher costs the event loop one write of a body that is there already."""

INTERVAL_S = 0.25
"""Shortest time between two overviews."""

ACTIVE_INTERVAL_S = 1.0
"""Longest time between two while a request is open or a model loads: ages and rates change by themselves."""

REST_INTERVAL_S = 5.0
"""Longest time between two."""

MAX_UNREAD_FRAMES = 256
"""Finished requests and lists of log events that a watcher may leave unread before the oldest are dropped."""

MAX_LOG_EVENTS = 100
"""Log events that are told at once; of more the newest."""

MakeOverview = Callable[[], Awaitable[Struct]]


class OverviewWatcher:
    """One watcher's unread frames: the newest overview alone, and whatever else there was. Lives on the event loop."""

    def __init__(self, on_close: Callable[[OverviewWatcher], None]) -> None:
        self._on_close = on_close
        self._overview = b""
        self._frames: deque[bytes] = deque(maxlen=MAX_UNREAD_FRAMES)
        self._is_ended = False
        self._wake = asyncio.Event()

    def show(self, overview: bytes) -> None:
        """Replace the overview that has not been read yet."""
        self._overview = overview
        self._wake.set()

    def push(self, frame: bytes) -> None:
        """Add a frame that comes after the next overview."""
        self._frames.append(frame)
        self._wake.set()

    def end(self) -> None:
        """Let the watcher read what is left, and then nothing more."""
        self._is_ended = True
        self._wake.set()

    def close(self) -> None:
        """Watch no longer; again is no mistake."""
        self._on_close(self)

    async def take(self) -> bytes:
        """Return the unread frames; empty at the end."""
        await self._wake.wait()
        body = b"".join([*self._frames, self._overview])
        self._frames.clear()
        self._overview = b""
        if not self._is_ended:
            self._wake.clear()
        return body


class OverviewFeed:
    """Makes an overview after each change while it is watched. Lives on the event loop, but for :meth:`wake`."""

    def __init__(
        self,
        log: LogRing,
        models_watched: Callable[[], AbstractContextManager[asyncio.Event]],
        is_active: Callable[[], bool],
    ) -> None:
        """Begin without watchers.

        Args:
            log: Of which new events are told.
            models_watched: Gives an event that is set when a model may do something else, until the context ends.
            is_active: Whether a request is open or a model loads.
        """
        self._log = log
        self._models_watched = models_watched
        self._is_active = is_active
        self._event_loop = asyncio.get_running_loop()
        self._watchers: set[OverviewWatcher] = set()
        self._changed = asyncio.Event()
        self._publishing: asyncio.Task[None] | None = None
        self._told_events = 0
        self._frame = b""

    def open(self, make: MakeOverview) -> OverviewWatcher:
        """Watch from now on, until the watcher is closed.

        Args:
            make: Makes an overview.

        Raises:
            TooManyInFlightError: There are ``MAX_WATCHERS`` already.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyInFlightError(
                f"{MAX_WATCHERS} others watch the overview already; there is room for no more"
            )
        watcher = OverviewWatcher(self._close)
        self._watchers.add(watcher)
        self._changed.set()
        if self._publishing is not None and self._frame:
            watcher.show(self._frame)
        elif self._publishing is None:
            _, self._told_events = self._log.newest()
            self._log.watch(self.wake)
            self._publishing = asyncio.create_task(self._publish(make))
        return watcher

    def touch(self) -> None:
        """Note that something has changed."""
        if self._watchers:
            self._changed.set()

    def wake(self) -> None:
        """Note it from any thread."""
        try:
            self._event_loop.call_soon_threadsafe(self.touch)
        except RuntimeError:
            return  # the event loop has closed

    def on_finished(self, finished: Struct) -> None:
        """Tell of a request that has ended."""
        if self._watchers:
            self._push(event_frame("finished", msgspec.json.encode(finished)))
            self._changed.set()

    def on_state(self, state: State) -> None:
        """The daemon is in another state; with the last one, every watch ends."""
        self.touch()
        if state is State.STOPPED:
            for watcher in self._watchers:
                watcher.end()

    def _close(self, watcher: OverviewWatcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers and self._publishing is not None:
            self._publishing.cancel()
            self._publishing, self._frame = None, b""
            self._log.watch(None)

    async def _publish(self, make: MakeOverview) -> None:
        try:
            with self._models_watched() as self._changed:
                while True:
                    self._changed.clear()
                    self._frame = event_frame("overview", msgspec.json.encode(await make()))
                    for watcher in self._watchers:
                        watcher.show(self._frame)
                    self._tell_log()
                    await asyncio.sleep(INTERVAL_S)
                    await self._until_due()
        finally:
            for watcher in self._watchers:
                watcher.end()

    async def _until_due(self) -> None:
        """Wait for a change, or for an overview without one."""
        wait_s = ACTIVE_INTERVAL_S if self._is_active() else REST_INTERVAL_S
        try:
            async with asyncio.timeout(wait_s - INTERVAL_S):
                await self._changed.wait()
        except TimeoutError:
            return

    def _tell_log(self) -> None:
        events, self._told_events = self._log.newest("info", since=self._told_events)
        if events:
            self._push(event_frame("log", msgspec.json.encode(events[-MAX_LOG_EVENTS:])))

    def _push(self, frame: bytes) -> None:
        for watcher in self._watchers:
            watcher.push(frame)
