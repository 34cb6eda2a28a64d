"""What ``GET /v1/models`` and ``GET /v1/models/{id}`` answer."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

__all__ = ["Model", "ModelList"]


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
