"""Ollama's ``/api/embed``, and ``/api/embeddings`` before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, TypeAlias

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.types import ASGIApp
from msgspec import UNSET, Meta, Struct

from machd.dialects.embeddings.request import EmbeddingOptions
from machd.dialects.embeddings.vector_form import vector_form, vectors_of
from machd.dialects.encoding import (
    OVERLOADS,
    EncoderCall,
    around_items,
    check_inputs,
    hold_encoder,
    json_response,
    vectors_response,
)
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import identify
from machd.dialects.input_making import make_inputs
from machd.dialects.model_kinds import require
from machd.dialects.ollama.answer import OllamaErrorBody
from machd.dialects.wire import bounds
from machd.dialects.wire.idle_time import read_keep_alive
from machd.dialects.wire.refusal import Ignored
from machd.engine.protocol.encoder import EncoderTask
from machd.http.context import ServerContext
from machd.http.stamps import arrived_s
from machd.reading.input_prompts import input_prompt

_NANOSECONDS = 1_000_000_000

_Texts: TypeAlias = Annotated[list[bounds.ContentText], Meta(max_length=bounds.MAX_INPUTS)]


class _OllamaRequest(EmbeddingOptions, frozen=True, kw_only=True):
    options: Ignored = UNSET

    @property
    def idle_s(self) -> float | None:
        return read_keep_alive(self.keep_alive)


class OllamaEmbedRequest(_OllamaRequest, frozen=True, kw_only=True):
    """Texts to be turned into vectors of length 1; without any the model is loaded alone.

    Attributes:
        truncate: Whether a text that is too long loses its end; true unless given.
        dimensions: Numbers that each vector is cut to, before it is normalised again.
    """

    input: bounds.ContentText | _Texts | None = None

    @property
    def texts(self) -> list[str]:
        """The texts; an empty one alone is none."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return self.input or []


class OllamaEmbeddingsRequest(_OllamaRequest, frozen=True, kw_only=True):
    """A text to be turned into a vector; an empty one loads the model alone."""

    prompt: bounds.ContentText | None = None


class OllamaEmbeddings(Struct, frozen=True, kw_only=True):
    """The vectors, in the order of the texts.

    Attributes:
        load_duration: From the request's arrival until its model was loaded.
        prompt_eval_count: Tokens of all texts, special tokens included.
    """

    model: str
    embeddings: list[Sequence[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct, frozen=True, kw_only=True):
    """The vector of one text."""

    embedding: Sequence[float]


@endpoint(
    "POST /api/embed",
    OllamaEmbeddings,
    takes=OllamaEmbedRequest,
    also=OVERLOADS,
    errors=(OllamaErrorBody,),
)
async def create_ollama_embeddings(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Vectors of texts, in Ollama's words."""
    body, call = await hold_encoder(request, context, OllamaEmbedRequest, truncates=True)
    began_s, clock = arrived_s(request.scope), context.clock
    load_s = clock.monotonic_s() - began_s
    vectors, tokens = await _vectors(call, body, body.texts, param="input", normalises=True)
    answer = OllamaEmbeddings(
        model=call.model.model_id,
        embeddings=[],
        total_duration=int((clock.monotonic_s() - began_s) * _NANOSECONDS),
        load_duration=int(load_s * _NANOSECONDS),
        prompt_eval_count=tokens,
    )
    before, after = around_items(answer, "embeddings")
    dimensions = call.model.encoder.dimensions if call.model.encoder else 1
    return await vectors_response(before, vectors, after, dimensions=dimensions)


@endpoint(
    "POST /api/embeddings",
    OllamaEmbedding,
    takes=OllamaEmbeddingsRequest,
    also=OVERLOADS,
    errors=(OllamaErrorBody,),
)
async def create_ollama_embedding(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> Response[bytes]:
    """The vector of one text, as Ollama's older clients ask for it."""
    body, call = await hold_encoder(request, context, OllamaEmbeddingsRequest, truncates=True)
    texts = [body.prompt] if body.prompt else []
    vectors, _ = await _vectors(call, body, texts, param="prompt", normalises=False)
    return json_response(msgspec.json.encode(OllamaEmbedding(embedding=next(vectors, []))))


async def _vectors(
    call: EncoderCall, body: EmbeddingOptions, texts: Sequence[str], *, param: str, normalises: bool
) -> tuple[Iterator[Sequence[float]], int]:
    """Return the vectors of texts, made as they are asked for, and their tokens."""
    encoder = require(call.model, EncoderTask.EMBED)
    body.check_dimensions(encoder)
    if not texts:
        return iter(()), 0
    check_inputs(call.context, texts, param=param)
    make = partial(
        make_inputs,
        inputs=texts,
        prompt=input_prompt(encoder),
        truncates=call.truncates,
        param=param,
    )
    identity = identify(call.request, call.context, endpoint="ollama_embed", prefix="ollama-")
    encoded = await call.encode(make, identity)
    in_form = vector_form(encoder, dimensions=body.dimensions, normalises=normalises)
    return (one.tolist() for one in vectors_of(encoded, in_form)), encoded.prompt_tokens
