"""The base of every section of the settings."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict


class Mark(Enum):
    """Marks that ``Annotated`` puts on a field beside its type."""

    SECRET = "secret"  # noqa: S105 - the name of a mark
    """The value is never shown. A ``SecretStr`` is secret without the mark."""

    RESTART = "restart"
    """A running daemon cannot take on another value; everything without the mark is live."""

    TABLES = "tables"
    """The field holds tables of keys and is no key itself: no flag and no variable sets it."""


class SettingsSection(BaseModel):
    """Base of every section: frozen, and with known keys only."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )
