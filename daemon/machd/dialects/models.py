"""``GET /v1/models`` and ``GET /v1/models/{id}``, in OpenAI's shape and in Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from litestar import Request
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import UNSET, Meta, Struct, UnsetType

from machd.dialects.anthropic.errors import AnthropicErrorBody
from machd.dialects.endpoint import endpoint
from machd.dialects.envelopes import speaks_anthropic
from machd.dialects.wire.errors import ErrorBody
from machd.engine.protocol.engine import ModelDescription
from machd.http.context import ServerContext


class Model(Struct, frozen=True, kw_only=True):
    """A model that is served.

    Attributes:
        created: When its weights were written, in seconds since 1970.
        max_model_len: Positions that prompt and completion share, in tokens; spelled as other
            servers spell this extension.
        default_sampling: What holds where a request says nothing, of the checkpoint's
            ``generation_config.json``; left out where that says nothing.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "machd"
    max_model_len: int
    default_sampling: dict[str, float] | UnsetType = UNSET


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


@endpoint(
    "GET|HEAD /v1/models",
    ModelList,
    AnthropicModelList,
    errors=(ErrorBody, AnthropicErrorBody),
)
async def list_models(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ModelList | AnthropicModelList:
    """The models that are served, each alias as one of its own behind them."""
    model = context.served.model
    names = tuple(dict.fromkeys((model.model_id, *context.names.aliases)))
    if speaks_anthropic(request.scope):
        return AnthropicModelList(
            data=[_anthropic_model(model, name) for name in names],
            first_id=names[0],
            last_id=names[-1],
        )
    return ModelList(data=[_model(model, name) for name in names])


@endpoint(
    "GET /v1/models/{id}",
    Model,
    AnthropicModel,
    also=(404,),
    errors=(ErrorBody, AnthropicErrorBody),
    id_as="model_id:path",
)
async def get_model(
    request: Request[Any, Any, Any],
    context: NamedDependency[ServerContext],
    model_id: FromPath[str],
) -> Model | AnthropicModel:
    """One model.

    Ids of hub models hold a slash.
    """
    context = context.of(context.find(model_id.removeprefix("/")))
    model = context.served.model
    name = model.model_id
    return _anthropic_model(model, name) if speaks_anthropic(request.scope) else _model(model, name)


def _model(model: ModelDescription, name: str) -> Model:
    return Model(
        id=name,
        created=model.created_unix_s,
        max_model_len=model.context_tokens,
        default_sampling=model.default_sampling.named or UNSET,
    )


def _anthropic_model(model: ModelDescription, name: str) -> AnthropicModel:
    created = datetime.fromtimestamp(model.created_unix_s, UTC)
    return AnthropicModel(
        id=name,
        display_name=name,
        created_at=created.isoformat().replace("+00:00", "Z"),
    )
