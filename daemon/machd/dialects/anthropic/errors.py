"""Operating errors in Anthropic's dialect."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from machd.errors import ContextLengthExceededError, FaultError, MachdError

AnthropicErrorType: TypeAlias = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
]
"""Anthropic's families of errors, which its clients tell apart."""

_TYPE_BY_STATUS: Mapping[int, AnthropicErrorType] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        405: "invalid_request_error",
        408: "timeout_error",
        # The admin API alone answers 409 and 412, and it does not speak this dialect.
        409: "invalid_request_error",
        412: "invalid_request_error",
        413: "request_too_large",
        415: "invalid_request_error",
        421: "invalid_request_error",
        429: "rate_limit_error",
        499: "api_error",
        500: "api_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


class AnthropicErrorDetail(Struct, frozen=True, kw_only=True):
    """One error: its family, and a message for a person, whose words may change."""

    type: AnthropicErrorType
    message: str


class AnthropicErrorBody(Struct, frozen=True, kw_only=True, tag="error", tag_field="type"):
    """The body of every failure below ``/v1/messages``, and of an error event in a stream.

    Attributes:
        request_id: As in the header of the same name; null where the request got none.
    """

    error: AnthropicErrorDetail
    request_id: str | None = None


def anthropic_error_body(error: MachdError, *, request_id: str | None) -> AnthropicErrorBody:
    """The wire form of an operating error."""
    return AnthropicErrorBody(
        error=AnthropicErrorDetail(type=_type(error), message=_message(error)),
        request_id=request_id,
    )


def anthropic_error_json(error: MachdError, *, request_id: str) -> bytes:
    """Encode an error in Anthropic's envelope."""
    return msgspec.json.encode(anthropic_error_body(error, request_id=request_id))


def _message(error: MachdError) -> str:
    if not isinstance(error, ContextLengthExceededError):
        return error.message
    prompt_tokens, context_tokens = error.prompt_tokens, error.context_tokens
    if error.asked_tokens is None or prompt_tokens >= context_tokens:
        return f"prompt is too long: {prompt_tokens} tokens > {context_tokens} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {prompt_tokens} + "
        f"{error.asked_tokens} > {context_tokens}, decrease input length or `max_tokens` and try again"
    )


def _type(error: MachdError) -> AnthropicErrorType:
    # A failure of machd's own is none of overload, whatever status invites to try again.
    if isinstance(error, FaultError):
        return "api_error"
    return _TYPE_BY_STATUS[error.http_status]
