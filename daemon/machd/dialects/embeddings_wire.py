"""What ``POST /v1/embeddings`` takes.

There is no answer to it yet: no architecture that machd serves offers embeddings. The body is read
all the same, so that a client learns what is wrong with its request and not only with the model.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from machd.dialects.wire.bounds import (
    ContentText,
    Dimensions,
    ModelName,
    TokenId,
    TokenIds,
    UnusedLabel,
)

# One list type for OpenAI's three, as in machd.dialects.completions.request.
_InputList: TypeAlias = Annotated[
    list[ContentText | TokenId | TokenIds], Meta(min_length=1, max_length=2**20)
]


class EmbeddingsRequest(Struct, frozen=True, kw_only=True):
    """Texts, or the ids of their tokens, to be turned into vectors."""

    model: ModelName | None = None
    input: ContentText | _InputList
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    user: UnusedLabel | None = None
