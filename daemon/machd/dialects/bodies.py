"""A request's body, decoded strictly."""

from __future__ import annotations

from typing import Any, TypeVar

import structlog
from litestar import Request
from msgspec import Struct

from machd.dialects.wire.decoding import decode_body, unknown_fields
from machd.http.bodies import read_json
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
