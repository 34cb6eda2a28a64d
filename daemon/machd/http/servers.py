"""The HTTP servers of a daemon: one for clients, and one for operators where there is one."""

from __future__ import annotations

import asyncio

from machd.http.server import HttpServer


class HttpServers:
    """All of them, started and ended together as far as their sockets allow."""

    def __init__(self, public: HttpServer, admin: HttpServer | None = None) -> None:
        """Begin without connections."""
        self._public = public
        self._all = (public,) if admin is None else (public, admin)

    def start(self) -> None:
        """Accept connections, except on an inherited public socket.

        A client of that one has been waiting since the last daemon left while the model loads,
        and goes on waiting until :meth:`start_all`; elsewhere clients are told that it loads.
        """
        for server in self._all:
            if server is not self._public or not server.listener.is_inherited:
                server.start()

    async def start_all(self) -> None:
        """Accept connections on every socket; returns once requests are read.

        Raises:
            FaultError: A server has ended instead.
        """
        for server in self._all:
            server.start()
            await server.wait_started()

    async def wait_ended(self) -> None:
        """Until one of them serves no longer; raises what ended it."""
        ended = [asyncio.create_task(server.wait_ended()) for server in self._all]
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                if task.done():
                    task.result()
        finally:
            for task in ended:
                task.cancel()

    def leave(self) -> None:
        """Send clients elsewhere; see :meth:`HttpServer.leave`. Operators are still answered."""
        self._public.leave()

    async def stop(self, timeout_s: float) -> None:
        """End all of them."""
        await asyncio.gather(*(server.stop(timeout_s) for server in self._all))
