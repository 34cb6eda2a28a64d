"""The gate of the admin listener: every request is stamped and checked before it is routed.

It gets an id. Pages of elsewhere are turned away: every request that carries another Origin than that of
machd's own page is refused, and so is every Host that a page could have made to point here.
"""

from __future__ import annotations

from collections.abc import Mapping

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from machd.admin.errors import ADMIN_ENVELOPE
from machd.clock import Clock
from machd.errors import (
    ForbiddenOriginError,
    MachdError,
    MisdirectedRequestError,
    TooManyInFlightError,
)
from machd.http.failures import always_answered, error_response
from machd.http.file_limit import ADMIN_CONNECTIONS
from machd.http.hosts import host_name, is_loopback_name, is_own_origin
from machd.http.stamps import stamp

MAX_OPEN_REQUESTS = ADMIN_CONNECTIONS
"""Requests that may be open at once: operators are few, and so are their programs."""


class AdminGate:
    """Stamps requests and turns away what no operator sends."""

    def __init__(self, app: ASGIApp, *, clock: Clock, state: Mapping[str, object]) -> None:
        """Guard ``app``, whose handlers find ``state`` on each request."""
        self._app = app
        self._answer = always_answered(app)
        self._clock = clock
        self._state = state
        self._open_count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        arrived_s = self._clock.monotonic_s()
        stamped = stamp(scope, ADMIN_ENVELOPE, arrived_s=arrived_s, state=self._state)

        async def send_stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", []), (b"x-request-id", stamped.encode())]
                if all(name != b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                message["headers"] = headers
            await send(message)

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send_stamped)
            return
        self._open_count += 1
        try:
            await self._answer(scope, receive, send_stamped)
        finally:
            self._open_count -= 1

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> MachdError | None:
        name = host_name(headers.get(b"host"))
        if not _is_unix(scope) and (name is None or not is_loopback_name(name)):
            return MisdirectedRequestError(
                "the Host header names no loopback host; the admin API has no other"
            )
        origin = headers.get(b"origin")
        if origin is not None and not is_own_origin(origin, headers.get(b"host")):
            return ForbiddenOriginError("pages of other origins may not call the admin API")
        if self._open_count >= MAX_OPEN_REQUESTS:
            return TooManyInFlightError(
                f"{self._open_count} admin requests are open; try again later"
            )
        return None


def _is_unix(scope: Scope) -> bool:
    """Return True if the request came over a Unix socket, which no browser can open."""
    server = scope.get("server")
    return server is None or server[1] is None
