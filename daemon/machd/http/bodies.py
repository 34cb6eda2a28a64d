"""A request's body: bytes that arrive in time and say that they are JSON."""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request
from litestar.exceptions import InternalServerException

from machd.errors import (
    BodyTimeoutError,
    ClientDisconnectedError,
    UnsupportedMediaTypeError,
)
from machd.http.large_bodies import BodyLimit, lease_of, structure_bytes


async def read_json(
    request: Request[Any, Any, Any], *, timeout_s: float, limit: BodyLimit | None = None
) -> bytes:
    """Read a body that says it is JSON; not decoded yet.

    Args:
        request: To read from.
        timeout_s: For the whole body.
        limit: Of its length; None for the application's own.

    Raises:
        BodyTooLargeError: It is longer than its limit.
        TooManyInFlightError: It is a large one, and others leave it no room.
        UnsupportedMediaTypeError: It is not plain ``application/json``. A browser sends other
            types without asking, so accepting one would let any page in.
        BodyTimeoutError: It did not arrive in time.
        ClientDisconnectedError: The client left before it had sent everything.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaTypeError(
            "send the body with the header Content-Type: application/json; with curl, add "
            "-H 'Content-Type: application/json'"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaTypeError("send the body without a Content-Encoding")
    try:
        async with asyncio.timeout(timeout_s):
            return await (request.body() if limit is None else _limited(request, limit))
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive within limits.stall_timeout_s ({timeout_s:g} s)"
        ) from None
    except InternalServerException:
        # The framework's word for a client that left before it had sent everything.
        raise ClientDisconnectedError("the client left while sending the body") from None


async def _limited(request: Request[Any, Any, Any], limit: BodyLimit) -> bytes:
    """Read a body, and refuse it as soon as it is seen to be too long.

    Raises:
        BodyTooLargeError, TooManyInFlightError: As for :func:`read_json`.
    """
    if (request.content_length or 0) > limit.max_bytes:
        raise limit.too_large()
    pieces: list[bytes] = []
    total_bytes = text_bytes = 0
    async for piece in request.stream():
        pieces.append(piece)
        total_bytes += len(piece)
        if total_bytes > limit.max_bytes:
            raise limit.too_large()
        if limit.max_bytes > limit.max_text_bytes:
            text_bytes += structure_bytes(piece)
            limit.check_text(text_bytes)
        if total_bytes > limit.max_text_bytes:
            lease_of(request.scope).grow_to(total_bytes)
    return b"".join(pieces)
