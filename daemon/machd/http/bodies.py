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
