"""The whole daemon in one body, and a stream of it: what the operators' page shows."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from litestar.di import NamedDependency
from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec import Struct

from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.admin.errors import AdminErrorBody
from machd.admin.memory_history import MemorySample
from machd.admin.models import AdminModel, shown_models
from machd.admin.open_requests import OpenRequest, open_requests
from machd.admin.overview_feed import OverviewWatcher
from machd.admin.status import AdminState, admin_state
from machd.errors import ClientDisconnectedError
from machd.http.endpoint import EVENTS, Answer, served
from machd.http.sse import EVENT_STREAM
from machd.http.stream import while_connected

_HEADERS = [(b"content-type", EVENT_STREAM), (b"x-accel-buffering", b"no")]


class Overview(Struct, frozen=True, kw_only=True):
    """State, models, open requests and memory of the daemon at one moment.

    Attributes:
        at: Seconds since 1970.
        models: As ``GET /admin/models`` lists them; sizes of files may be a minute old.
        requests: As ``GET /admin/requests`` lists them.
        memory: As ``now`` of ``GET /admin/memory``; the machine's part may be ten seconds old.
    """

    at: float
    state: AdminState
    models: list[AdminModel]
    requests: list[OpenRequest]
    memory: MemorySample


@endpoint("GET /admin/overview", Overview)
async def get_overview(admin: NamedDependency[AdminContext]) -> Overview:
    """State, models, open requests and memory of the daemon at one moment."""
    return await make_overview(admin)


async def make_overview(admin: AdminContext) -> Overview:
    """Return the daemon as it is now."""
    return Overview(
        models=await shown_models(admin, max_size_age_s=60.0),
        at=round(admin.clock.unix_s(), 3),
        state=admin_state(admin),
        requests=open_requests(admin),
        memory=admin.memory.now,
    )


@served(
    "GET /admin/overview/events",
    (
        Answer(200, Overview, EVENTS),
        *(Answer(status, AdminErrorBody) for status in (401, 403, 421, 503)),
    ),
)
async def watch_overview(admin: NamedDependency[AdminContext]) -> ASGIApp:
    """Stream the overview after each change, at most four times a second, and finished requests and log events.

    Event ``overview`` has the body of ``GET /admin/overview``; it comes at once, and every five seconds while nothing
    changes. Event ``finished`` has one request of ``GET /admin/requests/finished``, and ``log`` a list of new events of
    ``GET /admin/log`` from level info on.
    """
    return _OverviewStream(admin.overview.open(lambda: make_overview(admin)))


class _OverviewStream:
    """An ASGI application that owns one watcher, and lets go of it whatever happens."""

    def __init__(self, watcher: OverviewWatcher) -> None:
        self._watcher = watcher

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnectedError):
                await while_connected(receive, self._write(send))
        finally:
            self._watcher.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        while True:
            frames = await self._watcher.take()
            await send({"type": "http.response.body", "body": frames, "more_body": bool(frames)})
            if not frames:
                return
            await asyncio.sleep(0)
