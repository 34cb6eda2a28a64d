"""The models for an operator: what each does and takes, and having them loaded, unloaded and pinned."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from litestar import Request
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import Struct

from machd.admin.config import body_timeout_s
from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.capabilities.fit import MemoryNeeds
from machd.dialects.bodies import read_body
from machd.errors import ConflictError, NotFoundError
from machd.http.endpoint import Endpoint, endpoint_of
from machd.http.stream import while_connected
from machd.scheduler.waits import WaitReason
from machd.served.downloads import DownloadState
from machd.served.model_set import ModelToServe
from machd.served.named_model import NamedModel
from machd.served.turns import ModelState


class ModelMemory(Struct, frozen=True, kw_only=True):
    """Memory of a model by kind.

    Attributes:
        working_bytes: Beside weights and KV cache, while it computes.
        kv_budget_bytes: What its running sequences may take together.
    """

    weights_bytes: int
    working_bytes: int
    kv_budget_bytes: int
    total_bytes: int


class AdminModel(Struct, frozen=True, kw_only=True):
    """One model.

    Attributes:
        aliases: Other names under which requests find it.
        stage: What its load does; of a ready one, that its engine process is being replaced; null otherwise.
        progress: Bytes that its load has read of all that it reads, from 0 to 1; null unless it loads.
        pinned: Whether it gives way to no other model.
        idle_s: Since its last request ended; null while one holds it, and while it is not loaded.
        leases: Requests that hold it, those that wait for its load included.
        needed: Null until its files have been read once, and of the only model, which shares the memory with no other.
        reserved: Null while nothing is reserved.
        measured_bytes: Memory that its engine process holds, at most ten seconds ago, without files that it shares
            with others: weights, KV cache, prefix cache and the program itself. Null where that is not known, and while
            it has no process.
        loaded_at: When it was loaded, in RFC 3339; null while it is not.
        failure: Why its last load failed; null once it has been loaded since.
        path: Where it lies, as the settings name it; null for the embedded one.
        size_bytes: Of its files; null where they are not at this path, as those of a hub id.
    """

    name: str
    aliases: list[str]
    state: ModelState
    stage: str | None
    progress: float | None
    pinned: bool
    idle_s: float | None
    leases: int
    needed: ModelMemory | None
    reserved: ModelMemory | None
    measured_bytes: int | None
    loaded_at: str | None
    failure: str | None
    path: str | None
    size_bytes: int | None


class ModelDownload(Struct, frozen=True, kw_only=True):
    """A model that is being fetched from the hub.

    Attributes:
        total_bytes: 0 until the hub has told it.
        completed_bytes: What is on this machine.
    """

    model: str
    total_bytes: int
    completed_bytes: int


class AdminModelList(Struct, frozen=True, kw_only=True):
    """All models, the default one first, and the memory that they share.

    Attributes:
        download: What is being fetched; null where nothing is.
        budget_bytes: What all may take together; null until it is known what the device can hold.
        free_bytes: What is left of it; null until then.
    """

    models: list[AdminModel]
    download: ModelDownload | None
    budget_bytes: int | None
    reserved_bytes: int
    free_bytes: int | None


class UnloadRequest(Struct, frozen=True, kw_only=True):
    """Options of unloading a model.

    Attributes:
        now: Suspend its answers, which go on once it is loaded again.
    """

    now: bool = False


@endpoint("GET /admin/models", AdminModelList)
async def list_models(admin: NamedDependency[AdminContext]) -> AdminModelList:
    """The models: what each does, what it takes, and the memory that is left."""
    await admin.memory.refresh()
    budget_bytes, reserved_bytes = admin.models.budget_bytes, admin.models.reserved_bytes
    return AdminModelList(
        models=await shown_models(admin, max_size_age_s=0.0),
        download=_download(admin.downloads.state),
        budget_bytes=budget_bytes,
        reserved_bytes=reserved_bytes,
        free_bytes=None if budget_bytes is None else max(0, budget_bytes - reserved_bytes),
    )


async def shown_models(admin: AdminContext, *, max_size_age_s: float) -> list[AdminModel]:
    """Return the models, the default one first; sizes of files may have been looked up so long ago."""
    to_serve = admin.to_serve()
    return [
        await _shown(admin, one, to_serve[one.name], max_size_age_s=max_size_age_s)
        for one in admin.models
    ]


@endpoint(
    "POST /admin/models/{id}",
    AdminModel,
    takes=UnloadRequest,
    also=(404, 409),
    id_as="command:path",
)
async def steer_model(
    request: Request[Any, Any, Any],
    admin: NamedDependency[AdminContext],
    command: FromPath[str],
) -> AdminModel:
    """Load, unload, pin or unpin a model, by the last segment of the path.

    Names may hold slashes, which the framework allows in the last parameter alone.
    """
    name, _, verb = command.removeprefix("/").rpartition("/")
    steer = _COMMANDS.get(verb)
    if steer is None or not name:
        raise NotFoundError("nothing is served at this path")
    model = admin.find(name)
    await steer(request, admin, model)
    return await _shown(admin, model, admin.to_serve()[model.name])


async def load_model(
    request: Request[Any, Any, Any], admin: AdminContext, model: NamedModel
) -> None:
    """Load a model and wait until it is ready; one that failed is tried at once."""
    await while_connected(request.receive, admin.models.load(model))


async def unload_model(
    request: Request[Any, Any, Any], admin: AdminContext, model: NamedModel
) -> None:
    """Unload a model once it is idle; with now, suspend its answers."""
    is_now = False
    if request.content_length or "transfer-encoding" in request.headers:
        body = await read_body(request, UnloadRequest, timeout_s=body_timeout_s(admin))
        is_now = body.now
    _check_several(admin, model)
    if not is_now:
        model.unload()
    elif model.state is ModelState.LOADING:
        raise ConflictError(f"the model {model.name!r} is loading; unload it once it is loaded")
    else:
        model.suspend()


async def pin_model(
    _request: Request[Any, Any, Any], admin: AdminContext, model: NamedModel
) -> None:
    """Have a model give way to no other, until the next reload."""
    _check_several(admin, model)
    model.pin(is_pinned=True)


async def unpin_model(
    _request: Request[Any, Any, Any], admin: AdminContext, model: NamedModel
) -> None:
    """Have a model give way to others, until the next reload."""
    _check_several(admin, model)
    model.pin(is_pinned=False)


_Command = Callable[[Request[Any, Any, Any], AdminContext, NamedModel], Awaitable[None]]

_COMMANDS: Mapping[str, _Command] = MappingProxyType(
    {"load": load_model, "unload": unload_model, "pin": pin_model, "unpin": unpin_model}
)


def steering_endpoints() -> tuple[Endpoint, ...]:
    """Describe each command as an endpoint of its own."""
    whole = endpoint_of(steer_model)
    return tuple(
        replace(
            whole,
            name=f"{verb}_model",
            route=f"{whole.route}/{verb}",
            summary=(command.__doc__ or "").removesuffix("."),
            request=whole.request if command is unload_model else None,
        )
        for verb, command in _COMMANDS.items()
    )


def _check_several(admin: AdminContext, model: NamedModel) -> None:
    """Refuse what makes no sense for a model that lives as long as the daemon.

    Raises:
        ConflictError: It does.
    """
    if admin.to_serve()[model.name].is_one:
        raise ConflictError("the only model of a daemon is loaded as long as the daemon runs")


async def _shown(
    admin: AdminContext, model: NamedModel, to_serve: ModelToServe, *, max_size_age_s: float = 0.0
) -> AdminModel:
    # The default model has those of the section models as well.
    aliases = admin.names().aliases if model is admin.models.default else to_serve.aliases
    is_loaded = model.state is ModelState.READY
    loaded_unix_s = model.history.loaded_unix_s if is_loaded else None
    needed = None if model.needs is None else _memory(model.needs)
    return AdminModel(
        name=model.shown_name,
        aliases=[one for one in aliases if one != model.name],
        state=model.state,
        stage=_stage(model),
        progress=None if model.load_stage is None else round(model.load_stage.share, 2),
        pinned=model.residence.is_pinned,
        idle_s=None if model.idle_s is None else round(model.idle_s, 3),
        leases=model.leases,
        needed=needed,
        reserved=needed if model.claim.holds_memory else None,
        measured_bytes=admin.memory.held_bytes(model.served),
        loaded_at=None if loaded_unix_s is None else _moment(loaded_unix_s),
        failure=None if model.cause is None else str(model.cause),
        path=model.settings.model.path,
        size_bytes=await _size_bytes(admin, to_serve, model.settings.model.path, max_size_age_s),
    )


def _stage(model: NamedModel) -> str | None:
    if model.load_stage is not None:
        return model.load_stage.name
    is_replaced = model.served.snapshot.waits.reason is WaitReason.MODEL
    return "replacing its engine process" if model.is_ready and is_replaced else None


def _download(download: DownloadState | None) -> ModelDownload | None:
    if download is None:
        return None
    return ModelDownload(
        model=download.model,
        total_bytes=download.total_bytes,
        completed_bytes=download.completed_bytes,
    )


def _memory(needs: MemoryNeeds) -> ModelMemory:
    return ModelMemory(
        weights_bytes=needs.weights_bytes,
        working_bytes=needs.working_bytes,
        kv_budget_bytes=needs.kv_budget_bytes,
        total_bytes=needs.total_bytes,
    )


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


async def _size_bytes(
    admin: AdminContext, to_serve: ModelToServe, path: str | None, max_age_s: float
) -> int | None:
    """Return the size of a model's files: as it was found, or as it is."""
    if to_serve.found is not None or path is None:
        return None if to_serve.found is None else to_serve.found.size_bytes
    return await admin.sizes.of(path, max_age_s)
