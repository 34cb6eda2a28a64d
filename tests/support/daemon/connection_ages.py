"""A manual clock for the connections of daemons in this process: they age only when a test says so.

A busy machine then makes no healthy client look stalled.
"""

from __future__ import annotations

import asyncio

import pytest

from machd.http.connections import Connections
from support.clocks.polling import CEILING_S


class ConnectionAges:
    """Stands in for ``Connections.watch`` of every listener that starts after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stop the time of connections."""
        self._watched: list[tuple[asyncio.AbstractEventLoop, Connections]] = []
        watched = self._watched

        async def watch(self: Connections) -> None:
            watched.append((asyncio.get_running_loop(), self))
            await asyncio.Event().wait()

        monkeypatch.setattr(Connections, "watch", watch)

    def advance(self, seconds_s: float) -> None:
        """Let time pass for every connection, and return when the daemon has looked at all of them."""
        for event_loop, connections in self._watched:
            look = self._look(connections, seconds_s)
            asyncio.run_coroutine_threadsafe(look, event_loop).result(CEILING_S)

    @staticmethod
    async def _look(connections: Connections, seconds_s: float) -> None:
        connections.look(seconds_s)
