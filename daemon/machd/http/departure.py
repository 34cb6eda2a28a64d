"""Seeing that a client has left, while its answer is being made."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from litestar.types import Receive

from machd.errors import ClientDisconnectedError

_T = TypeVar("_T")


async def departed(receive: Receive) -> None:
    """Return when the client has left; only once the whole body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[object, object, _T]) -> _T:
    """Do ``work``, and cancel it when the client leaves.

    Raises:
        ClientDisconnectedError: The client left.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(departed(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnectedError("the client has left")
    finally:
        for task in (worker, watcher):
            task.cancel()
