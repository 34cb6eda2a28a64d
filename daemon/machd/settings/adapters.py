"""The section ``adapters``: LoRA adapters, under which names they are served, and how many are in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from machd.settings.section import Mark, SettingsSection
from machd.settings.texts import ModelName, Text

MAX_SCALE = 1000.0
"""Of an adapter, up and down: far beyond it, 16-bit weights overflow."""


class AdapterTable(SettingsSection):
    """An adapter that is served under a name of its own."""

    path: Text | None = Field(
        default=None,
        examples=["/srv/adapters/support"],
        description="Directory with the adapter's files, of mlx-lm or PEFT, or a GGUF file. Without it the name "
        "itself is that of an adapter in adapters.directory.",
    )
    base: ModelName | None = Field(
        default=None,
        examples=["coder"],
        description="Name of the model that the adapter was trained for. Without it the default model is.",
    )
    scale: float = Field(
        default=1.0,
        ge=-MAX_SCALE,
        le=MAX_SCALE,
        description="What the adapter counts for in requests that name it; 1 is as it was trained.",
    )
    pin: bool = Field(
        default=False,
        description="Never drop the adapter from memory to make room for another.",
    )


class AdaptersSettings(SettingsSection):
    """LoRA adapters, which are served by name beside their models."""

    directory: Text | None = Field(
        default=None,
        examples=["/srv/adapters"],
        description="Directory whose adapters are served under their names: each directory in it with an "
        "adapter_config.json, and each .gguf file.",
    )
    max_loaded: Annotated[int, Mark.RESTART] = Field(
        default=8,
        ge=1,
        le=1024,
        description="Adapters of a model that are in memory at once, and at most as many different ones compute "
        "at the same time. Further requests wait; those unused for longest are dropped.",
    )
    tables: Annotated[Mapping[str, AdapterTable], Mark.TABLES] = Field(default_factory=dict)
