"""The section ``models``: the names that requests may use."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from machd.settings.section import SettingsSection
from machd.settings.texts import Text

_MAX_NAME_CHARACTERS = 256


class ModelsSettings(SettingsSection):
    """Which names requests may use for the served model."""

    aliases: tuple[Annotated[Text, Field(max_length=_MAX_NAME_CHARACTERS)], ...] = Field(
        default=(),
        examples=[["gpt-4o-mini"]],
        description="Other names for the served model. Case, an organisation before a slash and a "
        ":latest at the end never matter, and the name default always works.",
    )
    accept_any: bool | None = Field(
        default=None,
        examples=[True],
        description="Whether every name means the served model, and a request may leave it out. Unless "
        "set: only where the daemon listens on loopback or a Unix socket.",
    )
