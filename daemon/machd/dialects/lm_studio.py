"""LM Studio's REST API about models: ``/api/v1/models`` with load and unload, and ``/api/v0/models``.

Shapes are of LM Studio's documentation (lmstudio.ai/docs/developer/rest: list, load, unload, and endpoints for v0). A model
has one instance at most, whose id is the model's name. Its packages for Python and TypeScript speak over web sockets:
:mod:`machd.dialects.lm_studio_socket`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from litestar import Request
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from machd.dialects.bodies import read_public_body
from machd.dialects.endpoint import endpoint
from machd.dialects.listed_adapters import ShownAdapter, described_adapter, listed_adapters
from machd.dialects.listed_models import ListedModel, listed_model, listed_models, parameter_size
from machd.dialects.model_loading import named_by_operator, unload
from machd.dialects.wire import bounds
from machd.dialects.wire.refusal import Ignored
from machd.engine.protocol.engine import ModelDescription
from machd.http.context import ServerContext
from machd.http.stream import while_connected
from machd.served.named_model import NamedModel

_Format: TypeAlias = Literal["gguf", "mlx"]


class LmStudioModel(Struct, frozen=True, kw_only=True):
    """A model of ``GET /api/v0/models``; what is not known of one that was never loaded is left out.

    Attributes:
        publisher: The organisation in its name; ``machd`` where it has none.
        quantization: How its weights are quantised, or the dtype of plain ones.
    """

    id: str
    object: Literal["model"] = "model"
    type: Literal["llm", "vlm", "embeddings"] = "llm"
    publisher: str
    arch: str | UnsetType = UNSET
    compatibility_type: _Format
    quantization: str | UnsetType = UNSET
    state: Literal["loaded", "not-loaded"]
    max_context_length: int | UnsetType = UNSET
    loaded_context_length: int | UnsetType = UNSET
    capabilities: list[Literal["tool_use"]] | UnsetType = UNSET


class LmStudioModelList(Struct, frozen=True, kw_only=True):
    """Every model that is served, as ``GET /api/v0/models`` tells them."""

    object: Literal["list"] = "list"
    data: list[LmStudioModel]


class LmStudioConfig(Struct, frozen=True, kw_only=True):
    """How an instance was loaded."""

    context_length: int


class LmStudioInstance(Struct, frozen=True, kw_only=True):
    """A loaded model."""

    id: str
    config: LmStudioConfig


class LmStudioQuantization(Struct, frozen=True, kw_only=True):
    """How weights are quantised; ``bits_per_weight`` counts their scales."""

    name: str
    bits_per_weight: float | None


class LmStudioCapabilities(Struct, frozen=True, kw_only=True):
    """What a model can do."""

    vision: bool
    trained_for_tool_use: bool


class LmStudioModelFacts(Struct, frozen=True, kw_only=True):
    """A model of ``GET /api/v1/models``; what is not known of one that was never loaded is null or left out.

    Attributes:
        size_bytes: Of its weights in memory, or else of its files; 0 where neither is known.
    """

    type: Literal["llm", "embedding"] = "llm"
    publisher: str
    key: str
    display_name: str
    architecture: str | None = None
    quantization: LmStudioQuantization | None = None
    size_bytes: int
    params_string: str | None = None
    loaded_instances: list[LmStudioInstance] = []
    max_context_length: int | UnsetType = UNSET
    format: _Format
    capabilities: LmStudioCapabilities | UnsetType = UNSET
    description: None = None


class LmStudioModelFactsList(Struct, frozen=True, kw_only=True):
    """Every model that is served, as ``GET /api/v1/models`` tells them."""

    models: list[LmStudioModelFacts]


class LmStudioLoad(Struct, frozen=True, kw_only=True):
    """A model that is to be loaded. How it is loaded is set in its table alone.

    Attributes:
        echo_load_config: Whether the answer says how it was loaded.
    """

    model: bounds.ModelName
    echo_load_config: bool | None = None
    context_length: Ignored = UNSET
    eval_batch_size: Ignored = UNSET
    flash_attention: Ignored = UNSET
    num_experts: Ignored = UNSET
    offload_kv_cache_to_gpu: Ignored = UNSET


class LmStudioLoaded(Struct, frozen=True, kw_only=True):
    """A model that is loaded; ``load_time_seconds`` counts from the request."""

    type: Literal["llm", "embedding"] = "llm"
    instance_id: str
    load_time_seconds: float
    status: Literal["loaded"] = "loaded"
    load_config: LmStudioConfig | UnsetType = UNSET


class LmStudioUnload(Struct, frozen=True, kw_only=True):
    """An instance that is to be unloaded."""

    instance_id: bounds.ModelName


class LmStudioUnloaded(Struct, frozen=True, kw_only=True):
    """An instance that is unloaded as soon as its answers have ended."""

    instance_id: str


class LmStudioGreeting(Struct, frozen=True, kw_only=True):
    """Says that LM Studio's clients are served."""

    lmstudio: Literal[True] = True


@endpoint("GET|HEAD /lmstudio-greeting", LmStudioGreeting, public=True)
async def greet_lm_studio() -> LmStudioGreeting:
    """Tell LM Studio's packages, which ask for this first, that they are served."""
    return LmStudioGreeting()


@endpoint("GET /api/v1/models", LmStudioModelFactsList)
async def list_lm_studio_models(context: NamedDependency[ServerContext]) -> LmStudioModelFactsList:
    """The models that are served, in LM Studio's words."""
    adapters = [_adapter_facts(one) for one in await listed_adapters(context)]
    return LmStudioModelFactsList(models=[*map(_facts, listed_models(context)), *adapters])


@endpoint("POST /api/v1/models/load", LmStudioLoaded, takes=LmStudioLoad)
async def load_lm_studio_model(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> LmStudioLoaded:
    """Load a model, in its turn, and answer once it is loaded."""
    body = await read_public_body(request, context, LmStudioLoad)
    model = named_by_operator(request, context, body.model)
    begin_s = context.clock.monotonic_s()
    model.retry()
    await while_connected(request.receive, _load(context, model))
    config = LmStudioConfig(context_length=model.served.model.context_tokens)
    return LmStudioLoaded(
        type=_v1_type(model.served.model),
        instance_id=model.shown_name,
        load_time_seconds=round(context.clock.monotonic_s() - begin_s, 3),
        load_config=config if body.echo_load_config else UNSET,
    )


@endpoint("POST /api/v1/models/unload", LmStudioUnloaded, takes=LmStudioUnload, also=(409,))
async def unload_lm_studio_model(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> LmStudioUnloaded:
    """Have a model unloaded once its answers have ended, unless another request comes before."""
    body = await read_public_body(request, context, LmStudioUnload)
    model = named_by_operator(request, context, body.instance_id)
    unload(model, context)
    return LmStudioUnloaded(instance_id=model.shown_name)


@endpoint("GET /api/v0/models", LmStudioModelList)
async def list_lm_studio_v0_models(context: NamedDependency[ServerContext]) -> LmStudioModelList:
    """The models that are served, in the words of LM Studio's older API."""
    adapters = [_adapter(one) for one in await listed_adapters(context)]
    return LmStudioModelList(data=[*map(_model, listed_models(context)), *adapters])


@endpoint("GET /api/v0/models/{id}", LmStudioModel, also=(404,), id_as="model_id:path")
async def get_lm_studio_v0_model(
    context: NamedDependency[ServerContext], model_id: FromPath[str]
) -> LmStudioModel:
    """One model, in the words of LM Studio's older API."""
    found = context.find_asked(model_id.removeprefix("/"))
    if found.adapter is not None:
        return _adapter(await described_adapter(context, found.adapter))
    return _model(listed_model(context, context.models[found.model_name]))


async def _load(context: ServerContext, model: NamedModel) -> None:
    lease = await context.models.lease(model, loads=True)
    lease.close()


def _model(listed: ListedModel) -> LmStudioModel:
    model = listed.description
    is_loaded = listed.model.is_ready
    told = LmStudioModel(
        id=listed.name,
        publisher=_publisher(listed),
        compatibility_type=_format(listed),
        state="loaded" if is_loaded else "not-loaded",
    )
    if model is None:
        return told
    return replace(
        told,
        type=_type(model),
        arch=model.architecture,
        quantization=model.quantization or model.dtype,
        max_context_length=model.context_tokens,
        loaded_context_length=model.context_tokens if is_loaded else UNSET,
        capabilities=["tool_use"] if "tools" in (listed.capabilities or ()) else [],
    )


def _adapter(shown: ShownAdapter) -> LmStudioModel:
    """An adapter is a model like its own; it is loaded where that one is."""
    return replace(_model(shown.base), id=shown.name)


def _adapter_facts(shown: ShownAdapter) -> LmStudioModelFacts:
    base = _facts(shown.base)
    instances = [replace(one, id=shown.name) for one in base.loaded_instances]
    return replace(
        base,
        key=shown.name,
        display_name=shown.name,
        size_bytes=shown.size_bytes,
        loaded_instances=instances,
    )


def _type(model: ModelDescription) -> Literal["llm", "vlm", "embeddings"]:
    if model.encoder is not None:
        return "embeddings"
    return "llm" if model.vision is None else "vlm"


def _facts(listed: ListedModel) -> LmStudioModelFacts:
    model = listed.description
    told = LmStudioModelFacts(
        publisher=_publisher(listed),
        key=listed.name,
        display_name=listed.name,
        size_bytes=listed.size_bytes or 0,
        format=_format(listed),
    )
    if model is None:
        return told
    instance = LmStudioInstance(
        id=listed.name, config=LmStudioConfig(context_length=model.context_tokens)
    )
    return replace(
        told,
        type=_v1_type(model),
        architecture=model.architecture,
        quantization=_quantization(model),
        params_string=parameter_size(model.parameters),
        loaded_instances=[instance] if listed.model.is_ready else [],
        max_context_length=model.context_tokens,
        capabilities=LmStudioCapabilities(
            vision=model.vision is not None,
            trained_for_tool_use="tools" in (listed.capabilities or ()),
        ),
    )


def _v1_type(model: ModelDescription) -> Literal["llm", "embedding"]:
    return "llm" if model.encoder is None else "embedding"


def _quantization(model: ModelDescription) -> LmStudioQuantization:
    bits = model.weights_bytes * 8 / model.parameters if model.parameters else None
    return LmStudioQuantization(
        name=model.quantization or model.dtype,
        bits_per_weight=None if bits is None else round(bits, 2),
    )


def _publisher(listed: ListedModel) -> str:
    return listed.name.rpartition("/")[0] or "machd"


def _format(listed: ListedModel) -> _Format:
    path = listed.model.settings.model.path or ""
    return "gguf" if path.lower().endswith(".gguf") else "mlx"
