"""The section ``speculation``: draft tokens and their verification."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from machd.settings.section import Mark, SettingsSection
from machd.settings.texts import Text

RequestedSpeculation: TypeAlias = Literal["auto", "off", "ngram", "draft", "dflash"]
"""The source of draft tokens that the settings ask for."""


class SpeculationSettings(SettingsSection):
    """Draft tokens that are proposed and verified together."""

    mode: Annotated[RequestedSpeculation, Mark.RESTART] = Field(
        default="auto",
        description="The proposer of draft tokens: ngram looks up what followed the same words before, draft asks "
        "speculation.draft_model, dflash a draft by diffusion. auto takes what can be had.",
    )
    draft_model: Annotated[Text | None, Mark.RESTART] = Field(
        default=None,
        examples=["models/SmolLM2-135M-Instruct"],
        description="The draft model, as model.path names one; it must have the served "
        "model's vocabulary.",
    )
    max_draft_tokens: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Most tokens that are drafted after one.",
    )
