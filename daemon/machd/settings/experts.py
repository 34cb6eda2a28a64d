"""The section ``experts``: experts on disk."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from machd.settings.section import Mark, SettingsSection

# The bounds stand with the number, because the word has none.
_ResidentGb: TypeAlias = Annotated[float, Field(ge=0.001, le=1_000_000.0)] | Literal["auto"] | None


class ExpertsSettings(SettingsSection):
    """Experts on disk, for models larger than memory."""

    resident_gb: Annotated[_ResidentGb, Mark.RESTART] = Field(
        default=None,
        examples=[8.0],
        description="Leave a model's experts on disk, with this much memory for those in use, in units of "
        "1,000,000,000 bytes; auto takes what other weights and the KV budget leave.",
    )
