"""Loading and unloading by name, as the router of llama.cpp takes it: ``POST /models/load`` and ``/models/unload``.

Shapes are of "Using multiple models" in llama.cpp's ``tools/server/README.md``; its page sends ``extra_args`` besides
(``tools/ui/src/lib/services/models.service.ts``), which machd has no use for, and then waits for the event that says so
(:mod:`machd.dialects.model_feed`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from litestar import Request
from litestar.di import NamedDependency
from msgspec import UNSET, Meta, Struct

from machd.dialects.bodies import read_public_body
from machd.dialects.endpoint import endpoint
from machd.dialects.wire import bounds
from machd.dialects.wire.refusal import Refused, refuse_unsupported
from machd.errors import ConflictError
from machd.http.authentication import require_operator
from machd.http.context import ServerContext
from machd.served.named_model import NamedModel


class ModelToLoad(Struct, frozen=True, kw_only=True):
    """A model that is to be loaded, or unloaded."""

    model: bounds.ModelName
    extra_args: Refused = UNSET


class LoadingBegun(Struct, frozen=True, kw_only=True):
    """What was asked for is being done; ``GET /models`` tells when it is."""

    success: Annotated[Literal[True], Meta(description="Always true; a failure is an error.")] = (
        True
    )


@endpoint("POST /models/load", LoadingBegun, takes=ModelToLoad)
async def load_model(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> LoadingBegun:
    """Have a model loaded, in its turn; the answer does not wait for it."""
    body = await read_public_body(request, context, ModelToLoad)
    refuse_unsupported(body)
    named_by_operator(request, context, body.model).load()
    return LoadingBegun()


@endpoint("POST /models/unload", LoadingBegun, takes=ModelToLoad, also=(409,))
async def unload_model(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> LoadingBegun:
    """Have a model unloaded once its answers have ended, unless another request comes before."""
    body = await read_public_body(request, context, ModelToLoad)
    unload(named_by_operator(request, context, body.model), context)
    return LoadingBegun()


def named_by_operator(
    request: Request[Any, Any, Any], context: ServerContext, asked: str
) -> NamedModel:
    """Return the model that an operator names.

    Raises:
        ModelNotServedError: It is not served.
        OperatorRequiredError: The request is no operator's.
        DrainingError: No new work is taken.
    """
    context.service.lifecycle.check_accepting()
    if not context.models.is_one:
        require_operator(request.scope)
    return context.find(asked)


def unload(model: NamedModel, context: ServerContext) -> None:
    """Have a model unloaded; ConflictError where it is the only one."""
    if context.models.is_one:
        raise ConflictError(
            "this server has one model, which stays loaded; it ends with the server"
        )
    model.unload()
