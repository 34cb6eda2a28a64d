"""Every way to fail on the admin listener, in OpenAI's envelope with an operator's details."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from machd.admin.cache_wire import MAX_WARM_BODY_BYTES
from machd.admin.endpoints import ADMIN_ENDPOINTS
from machd.admin.errors import admin_error_body
from machd.errors import (
    BodyTooLargeError,
    InvalidRequestError,
    MachdError,
    MethodNotAllowedError,
    NotFoundError,
    RequestError,
    SettingsError,
    StartupError,
)
from machd.http.failures import allowed_methods, error_headers, unexpected

MAX_BODY_BYTES = 64 * 1024
"""Of an admin request: settings are small."""

_BODY_BYTES_BY_PATH = {"/admin/cache/warm": MAX_WARM_BODY_BYTES}

_HTTP_ERRORS: dict[int, Callable[[str], RequestError]] = {
    404: lambda _path: NotFoundError("nothing is served at this path"),
    405: lambda _path: MethodNotAllowedError("this path does not take this method"),
    413: lambda path: BodyTooLargeError(
        f"the body is longer than {_BODY_BYTES_BY_PATH.get(path, MAX_BODY_BYTES)} bytes"
    ),
}


def _response(error: MachdError) -> Response[bytes]:
    return Response(
        msgspec.json.encode(admin_error_body(error)),
        status_code=_status(error),
        media_type="application/json",
        headers=error_headers(error),
    )


def _status(error: MachdError) -> int:
    """Settings that cannot be are the caller's mistake here, not the daemon's."""
    if isinstance(error, SettingsError):
        return HTTPStatus.BAD_REQUEST
    return error.http_status


def _on_machd_error(_request: Request[Any, Any, Any], error: MachdError) -> Response[bytes]:
    if isinstance(error, StartupError):
        # Such as keys that are no longer there while other machines can reach the daemon.
        return _response(SettingsError([error.message]))
    return _response(error)


def _on_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    make = _HTTP_ERRORS.get(error.status_code)
    if make is not None:
        response = _response(make(request.url.path))
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            response.set_header("Allow", allowed_methods(request.url.path, ADMIN_ENDPOINTS))
        return response
    if error.status_code < 500:
        return _response(InvalidRequestError("the request is not one that this server understands"))
    return _response(unexpected(error))


def _on_exception(_request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    return _response(unexpected(error))


ADMIN_EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    MachdError: _on_machd_error,
    HTTPException: _on_http_error,
    Exception: _on_exception,
}
