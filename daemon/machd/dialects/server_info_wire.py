"""What clients of other servers ask this one about itself: vLLM's version, llama.cpp's properties and slots.

The shapes are those servers'; what is not true of machd is left out of them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType


class Welcome(Struct, frozen=True, kw_only=True):
    """What answers at the root, and where the API begins.

    Attributes:
        base_url: What a client's base URL ends in where it does not add ``/v1`` itself.
    """

    server: Literal["machd"] = "machd"
    base_url: Literal["/v1"] = "/v1"
    openapi: Literal["/openapi.json"] = "/openapi.json"
    health: Literal["/health"] = "/health"


class ServerVersion(Struct, frozen=True, kw_only=True):
    """machd's version."""

    version: str


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """How a request is answered that says nothing about it."""

    n_predict: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    stream: bool


class GenerationDefaults(Struct, frozen=True, kw_only=True):
    """What holds for every request.

    Attributes:
        n_ctx: Positions that prompt and completion of one sequence share, in tokens.
        speculative: Whether draft tokens are proposed.
    """

    n_ctx: int
    speculative: bool
    params: SamplingDefaults


class Modalities(Struct, frozen=True, kw_only=True):
    """What the model reads besides text."""

    vision: Literal[False] = False
    audio: Literal[False] = False


class ServerProperties(Struct, frozen=True, kw_only=True):
    """The daemon and its model, as ``GET /props`` tells them.

    Attributes:
        total_slots: Sequences that can run at the same time.
        model_path: The model's name; machd tells no paths.
        chat_template: The Jinja source of conversations; left out where there is none.
    """

    default_generation_settings: GenerationDefaults
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str | UnsetType = UNSET
    modalities: Modalities
    build_info: str


class Slot(Struct, frozen=True, kw_only=True):
    """A place for a running sequence.

    Attributes:
        id: Slots are alike, so that those with the lowest ids are shown as the ones at work.
        n_ctx: Positions that prompt and completion share, in tokens.
        speculative: Whether draft tokens are proposed.
        is_processing: Whether a sequence runs in it.
    """

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
