"""What ``GET /v1/models`` and ``GET /v1/models/{id}`` answer, in OpenAI's shape and in Anthropic's."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class Model(Struct, frozen=True, kw_only=True):
    """A model that is served.

    Attributes:
        created: When its weights were written, in seconds since 1970.
        max_model_len: Positions that prompt and completion share, in tokens; spelled as other
            servers spell this extension.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "machd"
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    """Every model that is served."""

    object: Literal["list"] = "list"
    data: list[Model]


class AnthropicModel(Struct, frozen=True, kw_only=True, tag="model", tag_field="type"):
    """A model that is served, as Anthropic's clients read it.

    Attributes:
        created_at: When its weights were written.
    """

    id: str
    display_name: str
    created_at: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class AnthropicModelList(Struct, frozen=True, kw_only=True):
    """Every model that is served, on one page."""

    data: list[AnthropicModel]
    has_more: Literal[False] = False
    first_id: str
    last_id: str
