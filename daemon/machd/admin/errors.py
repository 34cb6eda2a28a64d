"""Errors of the admin API: OpenAI's envelope, with an operator's details beside it."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from msgspec import UNSET, Struct, UnsetType

from machd.dialects.wire.errors import ErrorDetail
from machd.errors import (
    MachdError,
    NotFoundError,
    RestartRequiredError,
    SettingsError,
    StartupError,
)
from machd.http.envelope import Envelope


class AdminErrorDetail(ErrorDetail, frozen=True, kw_only=True):
    """One error.

    Attributes:
        problems: A line for each thing that is wrong with the settings; left out elsewhere.
        keys: The settings that need a restart, dotted; left out elsewhere.
    """

    problems: list[str] | UnsetType = UNSET
    keys: list[str] | UnsetType = UNSET


class AdminErrorBody(Struct, frozen=True, kw_only=True):
    """The body of every answer of the admin API that is not a success."""

    error: AdminErrorDetail


def admin_error_body(error: MachdError) -> AdminErrorBody:
    """The wire form of an operating error."""
    is_settings = isinstance(error, SettingsError)
    return AdminErrorBody(
        error=AdminErrorDetail(
            message=error.message,
            # Wrong settings are a client's here; elsewhere they are the operator's.
            type="invalid_request_error" if is_settings else error.error_type,
            param=error.param,
            code=error.code,
            problems=list(error.problems) if isinstance(error, SettingsError) else UNSET,
            keys=list(error.keys) if isinstance(error, RestartRequiredError) else UNSET,
        )
    )


def _encode(error: MachdError, _request_id: str) -> bytes:
    if isinstance(error, StartupError):
        # Such as keys that are no longer there while other machines can reach the daemon.
        error = SettingsError([error.message])
    return msgspec.json.encode(admin_error_body(error))


def _status(error: MachdError) -> int:
    """Settings that cannot be are the caller's mistake here, not the daemon's."""
    is_settings = isinstance(error, SettingsError | StartupError)
    return HTTPStatus.BAD_REQUEST if is_settings else error.http_status


ADMIN_ENVELOPE = Envelope(
    _encode, lambda _path: NotFoundError("nothing is served at this path"), _status
)
