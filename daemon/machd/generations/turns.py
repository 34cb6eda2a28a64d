"""Turns at a few threads, for clients in rotation: a client with many requests delays each other client by one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """A number of turns at once. Lives on the event loop."""

    def __init__(self, count: int) -> None:
        """Begin with all turns free."""
        self._free = count
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, client: str, *, wait_s: float) -> AsyncIterator[None]:
        """Wait for a turn, and hold it inside.

        Args:
            client: The client. Its requests go in order; after each, every other waiting client has a turn.
            wait_s: Longest wait.

        Raises:
            TimeoutError: No turn came in time.
        """
        if self._free:
            self._free -= 1
        else:
            await self._come(client, wait_s)
        try:
            yield
        finally:
            self._pass_on()

    async def _come(self, client: str, wait_s: float) -> None:
        come = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(come)
        try:
            async with asyncio.timeout(wait_s):
                await come
        except BaseException:
            if come.done() and not come.cancelled():
                self._pass_on()  # the turn came while the request timed out
            raise

    def _pass_on(self) -> None:
        """Give a turn to the next client that waits."""
        while self._waiting:
            client, waiting = self._waiting.popitem(last=False)
            come = waiting.popleft()
            if waiting:
                self._waiting[client] = waiting  # behind all others
            if not come.done():
                come.set_result(None)
                return
        self._free += 1
