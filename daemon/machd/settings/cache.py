"""The section ``cache``: what is kept of prompts and answers, where, and in how many bits."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from machd.settings.section import Mark, SettingsSection
from machd.settings.texts import Text

KvFormatName: TypeAlias = Literal["none", "affine8", "affine4", "turboquant"]
"""How keys and values are stored."""

PromptRuleName: TypeAlias = Literal[
    "claude_code_billing",
    "claude_code_countdown",
    "claude_code_date",
    "opencode_date",
    "qwen_code_date",
    "template_date",
]
"""A text that changes between requests, and is taken out of prompts."""


class CacheSettings(SettingsSection):
    """Blocks of earlier prompts and answers, in memory and on disk."""

    prefix: Annotated[bool, Mark.RESTART] = Field(
        default=True,
        description="Keep keys and values of prompts and answers, for prompts that begin alike.",
    )
    block_tokens: Annotated[int, Mark.RESTART] = Field(
        default=64,
        ge=8,
        le=4096,
        description="Tokens that a block of the prefix cache has at the most: what is shared, "
        "dropped and written to disk in one piece.",
    )
    namespace: Literal["key", "shared"] = Field(
        default="key",
        description="Who may find what others left in the prefix cache: key keeps every API key to "
        "itself, shared lets all use all. A request's cache_salt keeps it apart in both.",
    )
    normalise: tuple[PromptRuleName, ...] = Field(
        default=(),
        examples=[["claude_code_billing"]],
        description="Take out of prompts what a client or the chat template changes between requests, so that "
        "they begin alike; the answer says so.",
    )
    memory_mb: int | None = Field(
        default=None,
        ge=0,
        le=1_000_000_000,
        examples=[4096],
        description="Memory of the prefix cache, in units of 1,000,000 bytes. Without it "
        "cache.memory_percent counts.",
    )
    memory_percent: float = Field(
        default=0.20,
        ge=0.0,
        le=0.9,
        description="Memory of the prefix cache, as a share of what the machine has left when the "
        "model is loaded: 0.2 is 20 %. It shrinks while less is left than the cache leaves to others.",
    )
    max_entries: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000,
        examples=[100],
        description="Texts that the prefix cache keeps at the most, whatever their length. Without "
        "it memory alone counts.",
    )
    disk_dir: Annotated[Text | None, Mark.RESTART] = Field(
        default=None,
        examples=["/var/cache/machd/blocks"],
        description="Directory of the prefix cache's disk tier, which outlives the daemon. "
        "It is made if it is not there, and only the daemon's user may read it.",
    )
    disk_budget_gb: float = Field(
        default=20.0,
        ge=0.0,
        le=1_000_000.0,
        description="Disk space that the disk tier may take, in units of 1,000,000,000 bytes.",
    )
    vectors_mb: int = Field(
        default=0,
        ge=0,
        le=1_000_000_000,
        examples=[64],
        description="Memory for an encoder's vectors and scores, in units of 1,000,000 bytes, so that a text "
        "that comes again is not computed again; 0 keeps none.",
    )
    kv_quantization: Annotated[KvFormatName, Mark.RESTART] = Field(
        default="none",
        description="In how many bits keys and values are kept: affine8 and affine4 in groups with a "
        "scale and an offset, turboquant in 4 after a random rotation. none keeps them as computed.",
    )
