"""``POST /v1/embeddings`` and ``POST /embedding``.

llama.cpp's clients send ``content`` or ask ``/embedding``, and get llama.cpp's list; all others OpenAI's object.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from litestar import Request
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from machd.dialects.embeddings.answer import (
    Embedding,
    EmbeddingList,
    LlamaCppEmbedding,
)
from machd.dialects.embeddings.request import EmbeddingsRequest
from machd.dialects.embeddings.vector_form import vector_form, vectors_of
from machd.dialects.encoding import (
    OVERLOADS,
    EncoderCall,
    around_items,
    check_inputs,
    hold_encoder,
    vectors_response,
)
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import identify
from machd.dialects.input_making import make_inputs
from machd.dialects.model_kinds import require
from machd.dialects.wire.encoder_usage import EncoderUsage
from machd.engine.protocol.encoder import EncoderTask
from machd.http.context import ServerContext
from machd.reading.input_prompts import input_prompt
from machd.reading.vectors import in_base64


@endpoint(
    "POST /v1/embeddings",
    EmbeddingList,
    list[LlamaCppEmbedding],
    takes=EmbeddingsRequest,
    also=OVERLOADS,
)
async def create_embeddings(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Vectors of texts."""
    body, call = await hold_encoder(request, context, EmbeddingsRequest)
    return await _embed(body, call, is_llama_cpp=body.content is not None)


@endpoint("POST /embedding", list[LlamaCppEmbedding], takes=EmbeddingsRequest, also=OVERLOADS)
async def create_llama_cpp_embeddings(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Vectors of texts, in llama.cpp's words."""
    body, call = await hold_encoder(request, context, EmbeddingsRequest)
    return await _embed(body, call, is_llama_cpp=True)


async def _embed(body: EmbeddingsRequest, call: EncoderCall, *, is_llama_cpp: bool) -> ASGIApp:
    encoder = require(call.model, EncoderTask.EMBED)
    inputs = body.inputs()
    check_inputs(call.context, inputs, param=body.inputs_param)
    await call.context.service.in_worker(body.check, encoder, call.model.vocabulary_tokens)
    prompt = input_prompt(
        encoder,
        prompt_name=body.prompt_name,
        input_type=body.input_type,
        instruction=body.instruction,
    )
    encoded = await call.encode(
        partial(
            make_inputs,
            inputs=inputs,
            prompt=prompt,
            encoder=encoder,
            truncates=call.truncates,
            param=body.inputs_param,
        ),
        identify(call.request, call.context, endpoint="embeddings", prefix="embd-"),
    )
    in_form = vector_form(
        encoder, dimensions=body.dimensions, normalises=is_llama_cpp or bool(body.normalize)
    )
    vectors = enumerate(vectors_of(encoded, in_form))
    if is_llama_cpp:
        items = (LlamaCppEmbedding(index=index, embedding=[one.tolist()]) for index, one in vectors)
        return await vectors_response(b"[", items, b"]", dimensions=encoder.dimensions)
    answer = EmbeddingList(
        data=[], model=call.model.model_id, usage=EncoderUsage.of(encoded.prompt_tokens)
    )
    before, after = around_items(answer, "data")
    is_base64 = body.encoding_format == "base64"
    embeddings = (
        Embedding(index=index, embedding=in_base64(one) if is_base64 else one.tolist())
        for index, one in vectors
    )
    return await vectors_response(before, embeddings, after, dimensions=encoder.dimensions)
