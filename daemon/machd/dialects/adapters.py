"""Adapters as vLLM and llama.cpp have them: loading and unloading by name, and ids with scales.

Shapes are of vLLM's ``entrypoints/serve/lora`` (``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``) and of "GET
/lora-adapters" in llama.cpp's ``tools/server/README.md``. Neither names a file: adapters are those that settings and the
directory of adapters name, and where they lie is told nobody.
"""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Request, Response
from litestar.di import NamedDependency
from msgspec import UNSET, Meta, Struct

from machd.dialects.bodies import read_public_body
from machd.dialects.endpoint import endpoint
from machd.dialects.wire import bounds
from machd.dialects.wire.other_servers import ListedAdapter
from machd.dialects.wire.refusal import Ignored
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.http.authentication import require_operator
from machd.http.bodies import read_json
from machd.http.context import ServerContext
from machd.http.endpoint import TEXT, Answer
from machd.http.large_bodies import BodyLimit

_MAX_ADAPTERS = 1024
"""Of a list of scales."""


class NamedLora(Struct, frozen=True, kw_only=True):
    """An adapter that is served.

    Attributes:
        id: As ``lora`` of a request takes it; the same as long as the daemon runs.
        path: Its name: where it lies is told nobody.
        scale: What it counts for in requests that say nothing of it, which is nothing.
    """

    id: int
    path: str
    scale: float = 0.0


class LoraToLoad(Struct, frozen=True, kw_only=True):
    """An adapter that is to be served.

    Attributes:
        lora_name: Of a table ``[adapters.NAME]``, or of an adapter in ``adapters.directory``.
        lora_path: Nothing but the name again: no request names a file.
    """

    lora_name: bounds.ModelName
    lora_path: bounds.ModelName | None = None
    base_model_name: Ignored = UNSET
    is_3d_lora_weight: Ignored = UNSET
    load_inplace: Ignored = UNSET


class LoraToUnload(Struct, frozen=True, kw_only=True):
    """An adapter that is to be served no longer."""

    lora_name: bounds.ModelName
    lora_int_id: Ignored = UNSET


@endpoint("GET /lora-adapters", list[NamedLora])
async def list_lora_adapters(context: NamedDependency[ServerContext]) -> list[NamedLora]:
    """The adapters of the default model, or of the one that the query names, in llama.cpp's words."""
    model = context.model or context.models.default
    return [
        NamedLora(id=one.number, path=context.name_of(one.adapter))
        for one in await context.adapters.listed()
        if context.models[one.adapter.model_name] is model
    ]


LoraScales = Annotated[list[ListedAdapter], Meta(max_length=_MAX_ADAPTERS)]


@endpoint("POST /lora-adapters", list[NamedLora], takes=LoraScales)
async def set_lora_adapters(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> None:
    """Refuse scales for all requests, which machd does not have: each request names its adapters."""
    limits = context.settings.limits
    await read_json(
        request,
        timeout_s=limits.client_stall_timeout_s,
        limit=BodyLimit.of(limits.max_body_bytes, max_images=0, max_image_bytes=0),
    )
    raise UnsupportedParameterError(
        "no adapter counts for requests that do not name it: send lora with each request, or the adapter's name as model"
    )


@endpoint("POST /v1/load_lora_adapter", Answer(200, None, TEXT), takes=LoraToLoad)
async def load_lora_adapter(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> Response[str]:
    """Serve an adapter that has come into the directory, or that was unloaded; its files are read and hashed."""
    body = await read_public_body(request, context, LoraToLoad)
    _check_operator(request, context)
    if body.lora_path not in (None, body.lora_name):
        raise InvalidRequestError.at(
            "lora_path",
            "a request names no files here: put the adapter into adapters.directory, and leave lora_path out or send its name",
        )
    await context.adapters.load(body.lora_name)
    return _told(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@endpoint("POST /v1/unload_lora_adapter", Answer(200, None, TEXT), takes=LoraToUnload)
async def unload_lora_adapter(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> Response[str]:
    """Refuse requests that name an adapter, until it is loaded or the settings are read again.

    Answers that run end with it.
    """
    body = await read_public_body(request, context, LoraToUnload)
    _check_operator(request, context)
    context.adapters.unload(body.lora_name)
    return _told(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_operator(request: Request[Any, Any, Any], context: ServerContext) -> None:
    """Raise OperatorRequiredError or DrainingError."""
    context.service.lifecycle.check_accepting()
    require_operator(request.scope)


def _told(text: str) -> Response[str]:
    return Response(text, media_type=TEXT)
