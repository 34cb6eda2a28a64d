"""A request's body, decoded strictly."""

from __future__ import annotations

from typing import Any, TypeVar

import structlog
from litestar import Request
from msgspec import Struct

from machd.dialects.wire.decoding import decode_body, unknown_fields
from machd.dialects.wire.media import media_characters
from machd.http.bodies import read_json
from machd.http.context import ServerContext
from machd.http.large_bodies import BodyLimit
from machd.http.stamps import request_id

_S = TypeVar("_S", bound=Struct)


async def read_public_body(
    request: Request[Any, Any, Any],
    context: ServerContext,
    type_: type[_S],
    *,
    takes_media: bool = False,
) -> _S:
    """Read and decode the body of a request to the public API; names of unknown fields go to the debug log.

    With ``takes_media`` it may hold images and videos, where the served model takes them.

    Raises:
        InvalidRequestError: It is not what ``type_`` takes.
        RequestError, UnavailableError, ClientDisconnectedError: As for :func:`read_json`.
    """
    settings = context.settings
    limit = BodyLimit.of(
        settings.limits.max_body_bytes,
        max_images=settings.vision.max_images if takes_media and context.served.takes_media else 0,
        max_image_bytes=settings.vision.max_image_bytes,
    )
    timeout_s = settings.limits.client_stall_timeout_s
    body = await read_json(request, timeout_s=timeout_s, limit=limit)
    decoded = _decoded(request, body, type_)
    if len(body) > limit.max_text_bytes:
        limit.check_text(len(body) - media_characters(decoded))
    return decoded


async def read_body(request: Request[Any, Any, Any], type_: type[_S], *, timeout_s: float) -> _S:
    """Read and decode a body within the application's own limit, as :func:`read_public_body`."""
    return _decoded(request, await read_json(request, timeout_s=timeout_s), type_)


def _decoded(request: Request[Any, Any, Any], body: bytes, type_: type[_S]) -> _S:
    decoded = decode_body(body, type_)
    log = structlog.get_logger("machd.http")
    if log.is_enabled_for(10) and (names := unknown_fields(body, type_)):
        log.debug("request.unknown_fields", request_id=request_id(request.scope), fields=names)
    return decoded
