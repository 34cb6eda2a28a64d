"""The admin application: every endpoint, behind a gate of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

from litestar import Litestar, Request
from litestar.connection import ASGIConnection
from litestar.di import Provide
from litestar.handlers import BaseRouteHandler
from litestar.types import ASGIApp

from machd.admin.context import AdminContext
from machd.admin.endpoints import ADMIN_ENDPOINTS, ADMIN_HANDLERS
from machd.admin.gate import AdminGate
from machd.admin.plain_page import post_plain_page
from machd.admin.token import TOKEN_KEY, AdminToken
from machd.admin.warming import MAX_WARM_BODY_BYTES
from machd.console.pages import Pages
from machd.http.context import ServerContext
from machd.http.endpoint import PUBLIC
from machd.http.failures import Failures
from machd.telemetry.metrics import Metrics

_MAX_BODY_BYTES = 64 * 1024
"""Longest body of an admin request: settings are small."""

_CONTEXT_KEY = "machd_admin"

_MAX_BODY_BYTES_BY_PATH = {"/admin/cache/warm": MAX_WARM_BODY_BYTES}


def create_admin_app(context: AdminContext, token: AdminToken) -> ASGIApp:
    """Build the application that answers on the admin listener; watchers hear of the daemon's state."""
    context.lifecycle.watch(context.feed.on_state)
    context.lifecycle.watch(context.overview.on_state)
    context.configuration.watch(lambda _: context.overview.touch())
    context.configuration.watch(context.feed.on_settings)
    context.configuration.watch(context.forget_pins)
    return AdminGate(
        Pages(routes(), "operator"),
        clock=context.clock,
        state={_CONTEXT_KEY: context, TOKEN_KEY: token},
    )


@cache
def routes() -> Litestar:
    """Build the routes, once; what they serve is in the state of each request."""
    return Litestar(
        [*ADMIN_HANDLERS, post_plain_page],
        dependencies={
            "admin": Provide(_asked, sync_to_thread=False),
            "context": Provide(_public, sync_to_thread=False),
            "metrics": Provide(_metrics, sync_to_thread=False),
        },
        exception_handlers=Failures(ADMIN_ENDPOINTS, _too_long).handlers,
        guards=[require_admin_token],
        request_max_body_size=_MAX_BODY_BYTES,
        openapi_config=None,
        logging_config=None,
    )


def _context(request: Request[Any, Any, Any]) -> AdminContext:
    context: AdminContext = request.scope["state"][_CONTEXT_KEY]
    return context


def _metrics(request: Request[Any, Any, Any]) -> Metrics:
    return _context(request).metrics


def _asked(request: Request[Any, Any, Any]) -> AdminContext:
    """Return the context of the model that the query names."""
    return _context(request).asked(request.query_params.get("model"))


def _public(request: Request[Any, Any, Any]) -> ServerContext:
    """Return that context for endpoints that both listeners have."""
    asked = request.query_params.get("model")
    public = _context(request).public()
    return public if asked is None else public.of(public.find(asked))


def _too_long(path: str) -> str:
    return f"the body is longer than {_MAX_BODY_BYTES_BY_PATH.get(path, _MAX_BODY_BYTES)} bytes"


async def require_admin_token(  # async so that the framework calls it here and not on a thread
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Guard of every route but health: AuthenticationError without the token."""
    if handler.opt.get(PUBLIC):
        return
    token: AdminToken = connection.scope["state"][TOKEN_KEY]
    token.check(connection.headers.get("authorization"))
