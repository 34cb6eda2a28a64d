"""The public application: every endpoint, behind the gate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from litestar import Litestar, Request
from litestar.config.cors import CORSConfig
from litestar.di import Provide
from litestar.types import ASGIApp, Receive, Scope, Send

from machd.console.pages import Pages
from machd.dialects.endpoints import PUBLIC_HANDLERS, PUBLIC_ROUTES, PUBLIC_SOCKETS
from machd.dialects.envelopes import envelope_of
from machd.dialects.inspection import get_metrics
from machd.dialects.openapi import HEADERS
from machd.http.authentication import ACCESS_KEY, Access, ApiKeys, HoldsToken, require_api_key
from machd.http.context import ServerContext
from machd.http.failures import Failures
from machd.http.gate import Gate, OpenRequests
from machd.telemetry.metrics import Metrics

_CORS_MAX_AGE_S = 600
_CONTEXT_KEY = "machd_context"
_METRICS_KEY = "machd_metrics"


def create_app(
    context: ServerContext,
    metrics: Metrics,
    api_keys: ApiKeys,
    *,
    open_requests: OpenRequests,
    max_connections: int,
    holds_admin_token: HoldsToken = lambda _: False,
) -> ASGIApp:
    """Build the application that answers on the public port.

    Where requests may change the models, they may have the admin token in place of a key.
    """
    settings = context.settings

    def is_operators(authorization: str | None) -> bool:
        has_operators = context.has_operators or bool(context.adapters)
        return has_operators and holds_admin_token(authorization)

    app = routes(tuple(settings.http.allowed_origins), has_metrics=settings.metrics.public)
    has_page = settings.console.public
    return Gate(
        Pages(app, "playground") if has_page else app,
        clock=context.clock,
        envelope_of=lambda scope: envelope_of(scope, is_one=context.models.is_one),
        allowed_hosts=settings.http.allowed_hosts,
        allowed_origins=settings.http.allowed_origins,
        has_page=has_page,
        max_in_flight=settings.limits.max_in_flight,
        max_connections=max_connections,
        open_requests=open_requests,
        on_refusal=metrics.count_rejection,
        state={
            ACCESS_KEY: Access(api_keys, is_operators),
            _CONTEXT_KEY: context,
            _METRICS_KEY: metrics,
        },
    )


@lru_cache(maxsize=4)
def routes(allowed_origins: Sequence[str], *, has_metrics: bool) -> Litestar:
    """Build the routes, which takes 47 ms of the event loop, once; what they serve is in the state of each request."""
    handlers = [one for one in PUBLIC_HANDLERS if has_metrics or one is not get_metrics]
    failures = Failures(
        PUBLIC_ROUTES, lambda _path: "the body is longer than limits.max_body_bytes"
    )
    return Litestar(
        [*handlers, *PUBLIC_SOCKETS],
        dependencies={
            "context": Provide(_context, sync_to_thread=False),
            "metrics": Provide(_metrics, sync_to_thread=False),
        },
        exception_handlers=failures.handlers,
        guards=[require_api_key],
        request_max_body_size=None,  # read_json holds each endpoint's own limit
        cors_config=_cors(allowed_origins),
        openapi_config=None,
        logging_config=None,
    )


def _context(request: Request[Any, Any, Any]) -> ServerContext:
    """Return the context of the model that the query names; the default one where it names none."""
    default: ServerContext = request.scope["state"][_CONTEXT_KEY]
    asked = request.query_params.get("model")
    return default if asked is None else default.of(default.find(asked))


def _metrics(request: Request[Any, Any, Any]) -> Metrics:
    metrics: Metrics = request.scope["state"][_METRICS_KEY]
    return metrics


def _cors(allowed_origins: Sequence[str]) -> CORSConfig | None:
    """Headers that let the pages of allowed origins read answers; none where none is allowed."""
    if not allowed_origins:
        return None
    return CORSConfig(
        allow_origins=[origin.lower() for origin in allowed_origins],
        allow_methods=["DELETE", "GET", "POST"],
        # Clients in a browser send headers of their own; the origins are what is restricted.
        allow_headers=["*"],
        expose_headers=[*HEADERS, "Request-Id"],
        max_age=_CORS_MAX_AGE_S,
    )


class AppSwitch:
    """Hands each request to the application of the moment."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with what is there now."""
        await self.app(scope, receive, send)
