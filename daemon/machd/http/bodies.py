"""A request's body: bytes of the right type, decoded strictly."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import structlog
from litestar import Request
from litestar.exceptions import InternalServerException
from msgspec import Struct

from machd.dialects.wire.decoding import decode_body, unknown_fields
from machd.errors import (
    BodyTimeoutError,
    ClientDisconnectedError,
    UnsupportedMediaTypeError,
)
from machd.http.stamps import request_id

_S = TypeVar("_S", bound=Struct)


async def read_body(request: Request[Any, Any, Any], type_: type[_S], *, timeout_s: float) -> _S:
    """Read and decode the body; names of unknown fields go to the debug log.

    Raises:
        InvalidRequestError: It is not what ``type_`` takes.
        RequestError, ClientDisconnectedError: As for :func:`read_json`.
    """
    body = await read_json(request, timeout_s=timeout_s)
    decoded = decode_body(body, type_)
    log = structlog.get_logger("machd.http")
    if log.is_enabled_for(10) and (names := unknown_fields(body, type_)):
        log.debug("request.unknown_fields", request_id=request_id(request.scope), fields=names)
    return decoded


async def read_json(request: Request[Any, Any, Any], *, timeout_s: float) -> bytes:
    """Read a body that says it is JSON; not decoded yet.

    Raises:
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
            return await request.body()
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive within limits.stall_timeout_s ({timeout_s:g} s)"
        ) from None
    except InternalServerException:
        # The framework's word for a client that left before it had sent everything.
        raise ClientDisconnectedError("the client left while sending the body") from None
