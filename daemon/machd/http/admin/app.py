"""The admin application: every endpoint, behind a gate of its own."""

from __future__ import annotations

from litestar import Litestar
from litestar.types import ASGIApp

from machd.http.admin.context import AdminContext
from machd.http.admin.token import AdminToken

__all__ = ["create_admin_app"]


def create_admin_app(_context: AdminContext, _token: AdminToken) -> ASGIApp:
    """Build the application that answers on the admin listener."""
    return Litestar([], openapi_config=None, logging_config=None)
