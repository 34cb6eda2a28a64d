"""``GET /admin/events``: what happens, as server-sent events, until the watcher or the daemon leaves."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec
from litestar.di import NamedDependency
from litestar.types import ASGIApp, Receive, Scope, Send

from machd.admin.context import AdminContext
from machd.admin.errors import AdminErrorBody
from machd.admin.event_feed import AdminEvent, EventFeed, StateChanged, Watcher
from machd.errors import ClientDisconnectedError
from machd.http.endpoint import EVENTS, Answer, served
from machd.http.sse import COMMENT_KEEP_ALIVE, event_frame
from machd.http.stream import while_connected

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
]


@served(
    "GET /admin/events",
    (
        Answer(200, AdminEvent, EVENTS),
        *(Answer(status, AdminErrorBody) for status in (401, 403, 421, 503)),
    ),
)
async def watch_events(admin: NamedDependency[AdminContext]) -> ASGIApp:
    """Stream events as they happen, without any text or tokens.

    The state comes first.
    """
    watcher = admin.feed.open()
    watcher.push(StateChanged(at=admin.clock.unix_s(), state=admin.lifecycle.state))
    keepalive_s = admin.configuration.settings.streaming.keepalive_s
    return _EventStream(admin.feed, watcher, keepalive_s=keepalive_s)


class _EventStream:
    """An ASGI application that owns one watcher, and lets go of it whatever happens."""

    def __init__(self, feed: EventFeed, watcher: Watcher, *, keepalive_s: float) -> None:
        self._feed = feed
        self._watcher = watcher
        self._keepalive_s = keepalive_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnectedError):
                await while_connected(receive, self._write(send))
        finally:
            self._feed.close(self._watcher)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        while True:
            try:
                async with asyncio.timeout(self._keepalive_s):
                    events = await self._watcher.take()
            except TimeoutError:
                await self._send(send, COMMENT_KEEP_ALIVE)
                continue
            await self._send(send, b"".join(map(_frame, events)), is_last=not events)
            if not events:
                return

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        # Neither sending nor taking has to wait while there is a backlog; others want their turn.
        await asyncio.sleep(0)


def _frame(event: AdminEvent) -> bytes:
    return event_frame(str(event.__struct_config__.tag), msgspec.json.encode(event))
