"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath

from machd.api.models import Model, ModelList
from machd.engine.protocol import ModelDescription
from machd.http.bodies import check_model
from machd.http.context import ServerContext

__all__ = ["get_model", "list_models"]


@get("/v1/models")
async def list_models(context: NamedDependency[ServerContext]) -> ModelList:
    """Every model that is served."""
    return ModelList(data=[_wire(context.service.model)])


@get("/v1/models/{model_id:path}")
async def get_model(context: NamedDependency[ServerContext], model_id: FromPath[str]) -> Model:
    """One model; ids of hub models hold a slash."""
    model = context.service.model
    check_model(model_id.removeprefix("/"), model.model_id)
    return _wire(model)


def _wire(model: ModelDescription) -> Model:
    return Model(
        id=model.model_id, created=model.created_unix_s, max_model_len=model.context_tokens
    )
