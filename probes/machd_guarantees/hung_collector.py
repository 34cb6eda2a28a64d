"""A trace collector that takes spans and never answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HungCollector:
    """A listener on loopback.

    Attributes:
        was_reached: Set once a daemon has sent it something.
    """

    endpoint: str
    was_reached: asyncio.Event

    @property
    def args(self) -> tuple[str, ...]:
        """Settings of a daemon that sends its spans there."""
        return ("--tracing-otlp-endpoint", self.endpoint)


@asynccontextmanager
async def hung_collector() -> AsyncIterator[HungCollector]:
    """Listen on loopback."""
    was_reached = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await reader.read(1):
                was_reached.set()
            while await reader.read(65_536):
                pass  # until the daemon closes the connection
        except ConnectionError:
            pass  # the daemon has ended
        finally:
            writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        yield HungCollector(f"http://{host}:{port}/v1/traces", was_reached)
