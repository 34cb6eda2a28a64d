"""How an operating error looks to an operator: OpenAI's envelope, and every detail beside it."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from machd.dialects.wire.errors import ErrorDetail
from machd.errors import MachdError, RestartRequiredError, SettingsError


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
            # Who asks for wrong settings here is a client; elsewhere there is none to blame.
            type="invalid_request_error" if is_settings else error.error_type,
            param=error.param,
            code=error.code,
            problems=list(error.problems) if isinstance(error, SettingsError) else UNSET,
            keys=list(error.keys) if isinstance(error, RestartRequiredError) else UNSET,
        )
    )
