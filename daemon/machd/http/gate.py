"""The gate: every request gets an id, and its Host and Origin are checked, before it is routed.

A plain ASGI wrapper around the application, because middleware of the framework does not run on
paths it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from machd.clock import Clock
from machd.errors import (
    ForbiddenOriginError,
    MachdError,
    MisdirectedRequestError,
    NotFoundError,
    TooManyInFlightError,
)
from machd.generations.trace_context import TraceContext, read_trace
from machd.http.envelope import Envelope
from machd.http.failures import (
    ON_REFUSAL_KEY,
    OnRefusal,
    always_answered,
    error_response,
)
from machd.http.hosts import host_name, is_own_origin, needs_no_name_server, web_origin
from machd.http.large_bodies import HeldBodies, lend
from machd.http.leases import end_leases
from machd.http.stamps import stamp

_HEALTH_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
_MAX_PATH_CHARACTERS = 4096
"""Longer than any path that is served. The framework keeps the last 1,024 paths in each of two
caches before it checks a key: at 60,000 characters they took 139 MB."""


class OpenRequests:
    """Requests that are being answered, under whatever settings they came.

    Attributes:
        count: Number of them.
        bodies: Bytes of their large bodies.
    """

    def __init__(self) -> None:
        self.count = 0
        self.bodies = HeldBodies()


class Gate:
    """Stamps requests, and refuses those of foreign browser pages."""

    def __init__(  # noqa: PLR0913 - a limit each
        self,
        app: ASGIApp,
        *,
        clock: Clock,
        envelope_of: Callable[[Scope], Envelope],
        allowed_hosts: Sequence[str],
        allowed_origins: Sequence[str],
        has_page: bool,
        max_in_flight: int,
        max_connections: int,
        open_requests: OpenRequests,
        on_refusal: OnRefusal,
        state: Mapping[str, object],
    ) -> None:
        """Guard ``app``, whose handlers find ``state`` on each request; ``on_refusal`` is told of refusals for want of room.

        Hosts in ``allowed_hosts`` are taken beside IP addresses and loopback names; ``*`` is all. Health counts for no limit.
        Where machd ``has_page``, that page may call it.
        """
        self._app = app
        self._answer = always_answered(app)
        self._clock = clock
        self._envelope_of = envelope_of
        self._allowed_hosts = frozenset(host.lower() for host in allowed_hosts)
        self._allowed_origins = frozenset(origin.lower() for origin in allowed_origins)
        self._has_page = has_page
        self._max_open, self._max_open_setting = min(
            (max_in_flight, "limits.max_in_flight"), (max_connections, "limits.max_connections")
        )
        self._open_requests = open_requests
        self._on_refusal = on_refusal
        self._state = {**state, ON_REFUSAL_KEY: on_refusal}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == ScopeType.WEBSOCKET:
            await self._open_socket(scope, receive, send)
            return
        headers = dict(scope["headers"])
        envelope = self._envelope_of(scope)
        arrived_s = self._clock.monotonic_s()
        stamped = stamp(
            scope, envelope, arrived_s=arrived_s, state=self._state, trace=_trace(scope)
        )
        id_headers = [(name, stamped.encode()) for name in envelope.id_headers]
        lease = lend(scope, self._open_requests.bodies)

        async def send_stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                if not lease.outlasts_start:
                    lease.release()  # the handler is done with the body
                message["headers"] = [*message.get("headers", []), *id_headers]
            await send(message)

        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send_stamped)
        elif scope["path"] in _HEALTH_PATHS:
            await self._answer(scope, receive, send_stamped)
        else:
            try:
                await self._count_in(scope, receive, send_stamped)
            finally:
                lease.release()

    async def _open_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a web socket on, or refuse it; what its client asks for then counts as requests of their own."""
        stamp(
            scope, self._envelope_of(scope), arrived_s=self._clock.monotonic_s(), state=self._state
        )
        refusal = self._refusal(scope["path"], dict(scope["headers"]))
        if refusal is None:
            await self._app(scope, receive, send)
            return

        async def send_refusal(message: Message) -> None:
            await send(cast(Message, {**message, "type": f"websocket.{message['type']}"}))

        await error_response(refusal)(scope, receive, send_refusal)

    async def _count_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer unless too many requests are open already."""
        if self._open_requests.count >= self._max_open:
            refusal = TooManyInFlightError(
                f"{self._open_requests.count} requests are open and {self._max_open_setting} is "
                f"{self._max_open}; try again later"
            )
            self._on_refusal(refusal.code, None)
            await error_response(refusal)(scope, receive, send)
            return
        self._open_requests.count += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._open_requests.count -= 1
            end_leases(scope)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> MachdError | None:
        if len(path) > _MAX_PATH_CHARACTERS:
            return NotFoundError("nothing is served at this path")
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if "*" not in self._allowed_hosts and not self._is_host_known(host):
            return _host_refusal(host)
        if origin is not None and not self._is_origin_allowed(origin, host):
            return _origin_refusal(origin)
        return None

    def _is_origin_allowed(self, origin: bytes, host: bytes | None) -> bool:
        if origin.decode("latin-1").lower() in self._allowed_origins:
            return True
        # A foreign name that was made to point here is its own page's host, too: ``*`` is no reason to trust it.
        return self._has_page and is_own_origin(origin, host) and self._is_host_known(host)

    def _is_host_known(self, host: bytes | None) -> bool:
        name = host_name(host)
        return name is not None and (name in self._allowed_hosts or needs_no_name_server(name))


def _host_refusal(header: bytes | None) -> MisdirectedRequestError:
    """Return the refusal of a host, with the line of configuration that allows it; only a well-formed name is quoted."""
    name = host_name(header)
    told = "HOST" if name is None else name
    return MisdirectedRequestError(
        "the Host header names no host of this server; "
        f"if clients reach it as {told}, {_how_to_allow('hosts', told)}"
    )


def _origin_refusal(header: bytes) -> ForbiddenOriginError:
    """Return the refusal of an origin, with the line of configuration that allows it; only a well-formed one is quoted."""
    if header == b"null":
        return ForbiddenOriginError(
            "a page without an origin, such as one opened from a file, may not call this server; "
            "serve the page from a web server, and allow its origin in http.allowed_origins"
        )
    told = web_origin(header) or "https://HOST"
    return ForbiddenOriginError(
        "pages of this origin may not call this server; "
        f"to let those of {told} call it, {_how_to_allow('origins', told)}"
    )


def _how_to_allow(what: str, value: str) -> str:
    """The line of configuration, in a file and in the environment.

    It has no present entries: a refused caller learns nothing of others.
    """
    return (
        f'add "{value}" to http.allowed_{what}: [http] allowed_{what} = ["{value}"] in the '
        f"configuration file, or LME_HTTP_ALLOWED_{what.upper()}={value}; keep the entries that are "
        "there"
    )


def _trace(scope: Scope) -> TraceContext | None:
    """The caller's trace; every header is looked at, because two that differ are none."""

    def given(name: bytes) -> list[str]:
        return [value.decode("latin-1") for one, value in scope["headers"] if one == name]

    return read_trace(given(b"traceparent"), given(b"tracestate"))
