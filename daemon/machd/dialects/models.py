"""``GET /v1/models`` and ``GET /v1/models/{id}``, in OpenAI's shape and in Anthropic's."""

from __future__ import annotations

from collections.abc import Container
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

from litestar import Request
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from machd.dialects.anthropic.errors import AnthropicErrorBody
from machd.dialects.endpoint import endpoint
from machd.dialects.envelopes import speaks_anthropic
from machd.dialects.listed_adapters import ShownAdapter, described_adapter, listed_adapters
from machd.dialects.listed_models import (
    ListedModel,
    listed_model,
    listed_models,
    models_by_name,
)
from machd.dialects.wire.errors import ErrorBody
from machd.engine.protocol.encoder import EncoderTask
from machd.http.context import ServerContext
from machd.served.named_model import NamedModel
from machd.served.turns import ModelState

_DOWNLOADING: Final = "downloading"
_STATES = [_DOWNLOADING, *(state.value for state in ModelState)]


class ModelStatus(Struct, frozen=True, kw_only=True):
    """What a model does, in the words of llama.cpp's router.

    Attributes:
        value: ``loading`` also while it waits for its turn; ``downloading`` is no model yet.
        failed: True where it could not be loaded, or its engine has failed for good.
        exit_code: 1 where it has failed, as clients look for one.
    """

    value: Literal["loaded", "loading", "unloaded", "downloading"]
    failed: Literal[True] | UnsetType = UNSET
    exit_code: Literal[1] | UnsetType = UNSET


class Model(Struct, frozen=True, kw_only=True):
    """A model that is served. From ``state`` on the fields are there where several models are.

    ``status`` and ``in_cache`` are as ``GET /models`` of llama.cpp's router has them (``tools/server/README.md``, "Using
    multiple models"); ``path`` and ``args`` are left out, as machd tells no paths.

    Attributes:
        created: When its weights were written, in seconds since 1970; 0 where that is not known.
        max_model_len: Positions that prompt and completion share, in tokens; spelled as other
            servers spell this extension. Left out while the model was never loaded.
        kind: Of a model that generates nothing: ``embed`` makes vectors, ``classify`` scores or classes. Left out of every
            other one, and while the model was never loaded.
        default_sampling: What holds where a request says nothing, of the checkpoint's
            ``generation_config.json``; left out where that says nothing.
        state: ``downloading`` where it is served once it has been fetched from the hub.
        progress: Bytes that its load, or its download, has read of all that it reads, from 0 to 1; only while it does.
        size_bytes: Of its weights in memory, or else of its files; left out where neither is known.
        completed_bytes: Of its files, what has come; only while it is fetched.
        capabilities: Names of its features in ``GET /v1/capabilities``; left out while it was never loaded.
        aliases: Other names for it.
        in_cache: Always false: machd fetches no model for a request.
        root: Of an adapter, its own name, as vLLM has its path there; left out of a model, as ``parent`` is.
        parent: Of an adapter, the id of the model that it changes.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "machd"
    max_model_len: int | UnsetType = UNSET
    kind: EncoderTask | UnsetType = UNSET
    default_sampling: dict[str, float] | UnsetType = UNSET
    state: Annotated[str, Meta(extra_json_schema={"enum": _STATES})] | UnsetType = UNSET
    progress: float | UnsetType = UNSET
    size_bytes: int | UnsetType = UNSET
    completed_bytes: int | UnsetType = UNSET
    capabilities: list[str] | UnsetType = UNSET
    aliases: list[str] | UnsetType = UNSET
    in_cache: Literal[False] | UnsetType = UNSET
    status: ModelStatus | UnsetType = UNSET
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET


class ModelList(Struct, frozen=True, kw_only=True):
    """Every model that is served."""

    object: Literal["list"] = "list"
    data: list[Model]


class AnthropicModel(Struct, frozen=True, kw_only=True, tag="model", tag_field="type"):
    """A model that is served, as Anthropic's clients read it.

    Attributes:
        created_at: When its weights were written; the beginning of 1970 where that is not known, as Anthropic has it.
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
    """The models that are served, each alias as one of its own behind them, then their adapters.

    Last the one that is being fetched, where the settings serve it once it is here.
    """
    adapters = await listed_adapters(context)
    models = {one.model: one for one in listed_models(context)}
    named = {name: models[model] for name, model in models_by_name(context).items()}
    if speaks_anthropic(request.scope):
        told = [_anthropic_model(name, model.created_unix_s) for name, model in named.items()]
        told += [_anthropic_model(one.name, one.created_unix_s) for one in adapters]
        return AnthropicModelList(data=told, first_id=told[0].id, last_id=told[-1].id)
    downloading = _downloading(context, named)
    cards = [_model(model, name) for name, model in named.items()]
    return ModelList(data=[*cards, *map(_adapter, adapters), *downloading])


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
    """One model, or an adapter.

    Ids of hub models hold a slash.
    """
    found = context.find_asked(model_id.removeprefix("/"))
    if found.adapter is not None:
        adapter = await described_adapter(context, found.adapter)
        if speaks_anthropic(request.scope):
            return _anthropic_model(adapter.name, adapter.created_unix_s)
        return _adapter(adapter)
    model = listed_model(context, context.models[found.model_name])
    if speaks_anthropic(request.scope):
        return _anthropic_model(model.name, model.created_unix_s)
    return _model(model, model.name)


def _model(listed: ListedModel, name: str) -> Model:
    model = listed.description
    told = Model(id=name, created=listed.created_unix_s)
    if model is not None:
        told = replace(
            told,
            max_model_len=model.context_tokens,
            kind=UNSET if model.encoder is None else model.encoder.task,
            default_sampling=model.default_sampling.named or UNSET,
        )
    if listed.is_one:
        return told
    stage = listed.model.load_stage
    return replace(
        told,
        state=listed.model.state,
        progress=UNSET if stage is None else round(stage.share, 2),
        size_bytes=UNSET if listed.size_bytes is None else listed.size_bytes,
        capabilities=UNSET if listed.capabilities is None else listed.capabilities,
        aliases=list(listed.aliases),
        in_cache=False,
        status=model_status(listed.model),
    )


def _adapter(shown: ShownAdapter) -> Model:
    """An adapter as vLLM lists one; what it does is what its model does."""
    base = shown.base
    return replace(
        Model(id=shown.name, created=shown.created_unix_s),
        max_model_len=UNSET if base.description is None else base.description.context_tokens,
        root=shown.listed.adapter.name,
        parent=base.name,
        size_bytes=shown.size_bytes,
    )


def _downloading(context: ServerContext, served: Container[str]) -> list[Model]:
    """The model that is being fetched, once the hub has told its size, unless its name is served already."""
    download = context.downloads.state
    if context.models.is_one or not context.settings.models.hub_cache or download is None:
        return []
    if not download.total_bytes or download.model in served:
        return []
    return [
        Model(
            id=download.model,
            created=0,
            state=_DOWNLOADING,
            progress=round(min(1.0, download.completed_bytes / download.total_bytes), 2),
            size_bytes=download.total_bytes,
            completed_bytes=download.completed_bytes,
            in_cache=False,
            status=ModelStatus(value=_DOWNLOADING),
        )
    ]


def model_status(model: NamedModel) -> ModelStatus:
    """Return what one of several models does."""
    if model.is_ready:
        return ModelStatus(value="loaded")
    if model.state is ModelState.FAILED:
        return ModelStatus(value="unloaded", failed=True, exit_code=1)
    if model.state is ModelState.LOADING or model.claim.waiting_since_s is not None:
        return ModelStatus(value="loading")
    return ModelStatus(value="unloaded")


def _anthropic_model(name: str, created_unix_s: int) -> AnthropicModel:
    created = datetime.fromtimestamp(created_unix_s, UTC)
    return AnthropicModel(
        id=name,
        display_name=name,
        created_at=created.isoformat().replace("+00:00", "Z"),
    )
