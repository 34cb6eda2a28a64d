"""Turns at a few threads, which clients take in rotation: one with many requests delays each of the others by one of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """So many turns at once. Lives on the event loop."""

    def __init__(self, count: int) -> None:
        """Begin with all of them free."""
        self._free = count
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def of(self, client: str, *, wait_s: float) -> AsyncIterator[None]:
        """Wait for a turn, and hold it inside.

        Args:
            client: Its requests come in their order, and after one of them each other client that waits has its turn.
            wait_s: The longest wait.

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
                self._pass_on()  # it came in the moment in which the request gave up
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
