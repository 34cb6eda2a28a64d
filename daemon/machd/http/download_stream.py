"""A download as an HTTP response: a JSON object on each line, until it ends or the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from litestar.types import Receive, Scope, Send

from machd.engine.protocol.downloads import DownloadEvent
from machd.errors import ClientDisconnectedError
from machd.http.sse import JSON_LINES
from machd.http.stream import while_connected
from machd.served.downloads import DownloadWatch

_HEADERS = [
    (b"content-type", JSON_LINES),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class DownloadStream:
    """An ASGI application that owns one watch of a download, and lets go of it whatever happens."""

    def __init__(
        self, watch: DownloadWatch, line: Callable[[DownloadEvent], bytes], *, keepalive_s: float
    ) -> None:
        """Take over a watch.

        Args:
            watch: Of the download.
            line: Encodes an event as one line or several.
            keepalive_s: Silence after which the last news is sent again.
        """
        self._watch = watch
        self._line = line
        self._keepalive_s = keepalive_s

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            with suppress(ClientDisconnectedError):
                await while_connected(receive, self._write(send))
        finally:
            self._watch.close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async for event in self._watch.events(self._keepalive_s):
            await send({"type": "http.response.body", "body": self._line(event), "more_body": True})
            # Neither sending nor taking has to wait while there is a backlog; others want their turn.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
