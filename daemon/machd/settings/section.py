"""What every section of the settings has in common."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict


class Mark(Enum):
    """What ``Annotated`` says of a field beyond its type."""

    SECRET = "secret"  # noqa: S105 - the name of a mark
    """The value is never shown. A ``SecretStr`` is secret without the mark."""

    RESTART = "restart"
    """A running daemon cannot take on another value; everything without the mark is live."""


class SettingsSection(BaseModel):
    """What every section has in common: it cannot change, and it knows its keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )
