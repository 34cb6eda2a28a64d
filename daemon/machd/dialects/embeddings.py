"""``POST /v1/embeddings``."""

from __future__ import annotations

from typing import Any, NoReturn

from litestar import Request, post
from litestar.di import NamedDependency

from machd.dialects.bodies import read_body
from machd.dialects.embeddings_wire import EmbeddingsRequest
from machd.errors import UnsupportedParameterError
from machd.http.context import ServerContext


@post(["/v1/embeddings", "/embeddings"], status_code=200)
async def create_embeddings(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> None:
    """Refuse: no architecture of mlx-lm's that machd serves is made for embeddings.

    The one place to ask a model about it, should that change.
    """
    timeout_s = context.settings.limits.stall_timeout_s
    body = await read_body(request, EmbeddingsRequest, timeout_s=timeout_s)
    context.service.lifecycle.check_accepting()
    context.check_model(body.model)
    _refuse()


def _refuse() -> NoReturn:
    raise UnsupportedParameterError(
        "the served model offers no embeddings; ask a server whose model is made for them",
        param="model",
    )
