"""Operating errors in OpenAI's envelope."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from machd.errors import MachdError


class ErrorDetail(Struct, frozen=True, kw_only=True):
    """One error.

    Attributes:
        message: For a person; its words may change.
        type: OpenAI's family, such as ``invalid_request_error``.
        param: The request field it is about, where there is one.
        code: For a program; stable.
    """

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success, and of an error event in a stream."""

    error: ErrorDetail


def error_body(error: MachdError) -> ErrorBody:
    """The wire form of an operating error."""
    return ErrorBody(
        error=ErrorDetail(
            message=error.message, type=error.error_type, param=error.param, code=error.code
        )
    )


def error_json(error: MachdError) -> bytes:
    """Encode an error in OpenAI's envelope."""
    return msgspec.json.encode(error_body(error))
