"""The section ``structured_output``: answers that follow a schema."""

from __future__ import annotations

from pydantic import Field

from machd.settings.section import SettingsSection


class StructuredOutputSettings(SettingsSection):
    """How schemas are read."""

    strict: bool = Field(
        default=False,
        description="Refuse a schema with keywords that no grammar can hold (uniqueItems, not, if, ...). "
        "Otherwise they are left out, and the header X-Ignored-Schema-Keywords names them.",
    )
