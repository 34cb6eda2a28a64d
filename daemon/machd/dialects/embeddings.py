"""``POST /v1/embeddings``, which is refused: no model that can be served offers embeddings.

There is no answer to it yet: no architecture that machd serves offers embeddings. The body is read
all the same, so that a client learns what is wrong with its request and not only with the model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from litestar import Request
from litestar.di import NamedDependency
from msgspec import Meta, Struct

from machd.dialects.bodies import read_public_body
from machd.dialects.endpoint import endpoint
from machd.dialects.wire import bounds
from machd.errors import UnsupportedParameterError
from machd.http.context import ServerContext

# One list type for OpenAI's three, as in machd.dialects.completions.request.
_InputList: TypeAlias = Annotated[
    list[bounds.ContentText | bounds.TokenId | bounds.TokenIds],
    Meta(min_length=1, max_length=2**20),
]


class EmbeddingsRequest(Struct, frozen=True, kw_only=True):
    """Texts, or the ids of their tokens, to be turned into vectors."""

    model: bounds.ModelName | None = None
    input: bounds.ContentText | _InputList
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: bounds.Dimensions | None = None
    user: bounds.UnusedLabel | None = None


@endpoint("POST /v1/embeddings", takes=EmbeddingsRequest)
async def create_embeddings(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> None:
    """Vectors of texts; no model that can be served offers them yet.

    The one place to ask a model about it, should that change.
    """
    body = await read_public_body(request, context, EmbeddingsRequest)
    context.service.lifecycle.check_accepting()
    context.find(body.model)
    raise UnsupportedParameterError(
        "the served model offers no embeddings; ask a server whose model is made for them",
        param="model",
    )
