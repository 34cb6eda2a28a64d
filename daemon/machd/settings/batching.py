"""The section ``continuous_batching``: how many requests are decoded together, and in how much memory."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from machd.settings.section import SettingsSection

# The bounds stand with the number, because the word has none.
_ChunkTokens: TypeAlias = Annotated[int, Field(ge=1, le=65_536)] | Literal["auto"]


class ContinuousBatchingSettings(SettingsSection):
    """Decoding of several requests together, and its limits."""

    enabled: bool = Field(
        default=False,
        description="Decode several requests together, where the model is known to give every one "
        "of them what it would get alone; else one at a time.",
    )
    max_b: int = Field(
        default=4,
        ge=1,
        le=256,
        description="Sequences that decode together at the most: the batch width.",
    )
    window_ms: float = Field(
        default=5.0,
        ge=0.0,
        le=10_000.0,
        description="Milliseconds that an idle daemon waits for more requests before it starts; a "
        "running batch never waits.",
    )
    kv_budget_gb: float = Field(
        default=10.0,
        ge=0.0001,
        le=1_000_000.0,
        description="Memory that the running sequences may take together, in units of "
        "1,000,000,000 bytes; never more than 60 % of what the device can hold.",
    )
    kv_policy: Literal["defer", "reject"] = Field(
        default="defer",
        description="What a request meets when the budget is spent: defer lets it wait, reject "
        "answers 429 with Retry-After.",
    )
    prefill_chunk_tokens: _ChunkTokens = Field(
        default="auto",
        description="Prompt tokens computed in one step beside running streams; auto measures how "
        "many fill the prompts' share of the time.",
    )
    prefill_share: float = Field(
        default=0.45,
        ge=0.05,
        le=0.95,
        description="Share of a step's time that prompts get beside running streams; more where more "
        "prompts wait than streams run, in steps of at most 0.25 s.",
    )
    coalesce: bool = Field(
        default=True,
        description="Let identical deterministic requests of one client share one decode.",
    )
