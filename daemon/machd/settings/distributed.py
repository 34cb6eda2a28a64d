"""The section ``distributed``: a model that several ranks compute together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from machd.settings.section import Mark, SettingsSection


class DistributedSettings(SettingsSection):
    """Several ranks that compute one model; mlx.launch starts them."""

    mode: Annotated[Literal["auto", "tensor", "pipeline"], Mark.RESTART] = Field(
        default="auto",
        description="How ranks share the model: tensor cuts every layer, pipeline gives each rank some "
        "layers; auto takes the first that the model's code can do.",
    )
