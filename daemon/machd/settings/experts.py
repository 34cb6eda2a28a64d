"""The section ``experts``: where the experts of a mixture-of-experts model lie while it is served."""

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
        description="Leave a model's experts on disk and keep those in use in so much memory, in units of "
        "1,000,000,000 bytes; auto takes what the rest of the model and the KV budget leave. Without it "
        "the whole model is in memory.",
    )
