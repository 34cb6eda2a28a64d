"""Vectors as OpenAI and llama.cpp write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from machd.dialects.wire.encoder_usage import EncoderUsage


class Embedding(Struct, frozen=True, kw_only=True):
    """The vector of one input; a text holds little-endian float32 numbers in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Sequence[float] | str


class EmbeddingList(Struct, frozen=True, kw_only=True):
    """The vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EncoderUsage


class LlamaCppEmbedding(Struct, frozen=True, kw_only=True):
    """The vector of one input as llama.cpp writes it: the only one of a list, which would hold one a token without pooling."""

    index: int
    embedding: list[Sequence[float]]
