"""A whole JSON body as an HTTP response, in parts: other clients have their turn between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from litestar.types import Receive, Scope, Send


class PartsResponse:
    """An ASGI application that answers with a body whose parts are there."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        """Take over the parts of a JSON body."""
        self._parts = parts

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer; what is sent to a client that has left is dropped."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(sum(map(len, self._parts))).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
