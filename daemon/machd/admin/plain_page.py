"""The operators' page for browsers without scripts: tables of what the admin API says."""

from __future__ import annotations

import html
from typing import Any, cast

import msgspec
from litestar import Request, Response, post
from litestar.di import NamedDependency

from machd.admin.context import AdminContext
from machd.admin.models import list_models
from machd.admin.requests import list_requests
from machd.admin.status import get_status
from machd.admin.token import TOKEN_KEY, AdminToken
from machd.console.pages import HEADERS
from machd.http.endpoint import PUBLIC

_FIELD = "token"
_NOT_KEPT = {"cache-control": "no-store"}


@post("/console/plain", status_code=200, opt={PUBLIC: True})
async def post_plain_page(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> Response[str]:
    """Answer the form of the page: the token comes in its body, as a form can send no header.

    Raises:
        AuthenticationError: It is not the token.
    """
    given = (await request.form()).get(_FIELD)
    token: AdminToken = request.scope["state"][TOKEN_KEY]
    token.check(f"Bearer {given}")
    status = msgspec.to_builtins(await _asked(get_status, admin))
    requests = msgspec.to_builtins(await _asked(list_requests, admin))
    models = msgspec.to_builtins(await _asked(list_models, admin))
    parts = {"Status": status, "Open requests": requests["requests"], "Models": models["models"]}
    body = "".join(f"<h2>{name}</h2>{_shown(value)}" for name, value in parts.items())
    return Response(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>machd</title>'
        '<link rel="stylesheet" href="/console/shared/base.css">'
        f"<h1>machd</h1>{body}",
        media_type="text/html",
        headers={name.decode(): value.decode() for name, value in HEADERS} | _NOT_KEPT,
    )


async def _asked(handler: Any, admin: AdminContext) -> object:  # noqa: ANN401 - the framework's
    """Return what an endpoint's handler answers."""
    return await handler.fn(admin)


def _shown(value: object) -> str:
    """Write a value as a table where it has parts, as text else."""
    if isinstance(value, dict):
        rows = cast("dict[str, object]", value).items()
        cells = (
            f"<tr><th>{html.escape(name)}</th><td>{_shown(one)}</td></tr>" for name, one in rows
        )
        return f"<table>{''.join(cells)}</table>"
    if isinstance(value, list):
        return "".join(_shown(one) for one in cast("list[object]", value)) or "none"
    return html.escape("" if value is None else str(value))
