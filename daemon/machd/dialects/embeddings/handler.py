"""``POST /v1/embeddings`` and ``POST /embedding``.

llama.cpp's clients send ``content`` or ask ``/embedding``, and get llama.cpp's list; all others OpenAI's object.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency

from machd.dialects.embeddings.answer import (
    Embedding,
    EmbeddingList,
    LlamaCppEmbedding,
)
from machd.dialects.embeddings.request import EmbeddingsRequest
from machd.dialects.embeddings.vector_form import VectorForm, vector_form, vectors_of
from machd.dialects.encoding import (
    OVERLOADS,
    EncoderCall,
    check_inputs,
    hold_encoder,
    json_response,
)
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import identify
from machd.dialects.input_making import make_inputs
from machd.dialects.model_kinds import require
from machd.dialects.wire.encoder_usage import EncoderUsage
from machd.engine.protocol.encoder import EncoderInput, EncoderTask, InputTokenizer
from machd.generations.encodings import Encoded
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
) -> Response[bytes]:
    """Vectors of texts."""
    body, call = await hold_encoder(request, context, EmbeddingsRequest)
    return await _embed(body, call, is_llama_cpp=body.content is not None)


@endpoint("POST /embedding", list[LlamaCppEmbedding], takes=EmbeddingsRequest, also=OVERLOADS)
async def create_llama_cpp_embeddings(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> Response[bytes]:
    """Vectors of texts, in llama.cpp's words."""
    body, call = await hold_encoder(request, context, EmbeddingsRequest)
    return await _embed(body, call, is_llama_cpp=True)


async def _embed(
    body: EmbeddingsRequest, call: EncoderCall, *, is_llama_cpp: bool
) -> Response[bytes]:
    encoder = require(call.model, EncoderTask.EMBED)
    inputs = body.inputs()
    check_inputs(call.context, inputs, param=body.inputs_param)
    vocabulary_tokens = call.model.vocabulary_tokens
    prompt = input_prompt(
        encoder,
        prompt_name=body.prompt_name,
        input_type=body.input_type,
        instruction=body.instruction,
    )

    def make(tokenizer: InputTokenizer) -> Sequence[EncoderInput]:
        body.check(encoder, vocabulary_tokens)
        return make_inputs(
            tokenizer,
            inputs=inputs,
            prompt=prompt,
            encoder=encoder,
            truncates=call.truncates,
            param=body.inputs_param,
        )

    encoded = await call.encode(
        make,
        identify(call.request, call.context, endpoint="embeddings", prefix="embd-"),
    )
    in_form = vector_form(
        encoder, dimensions=body.dimensions, normalises=is_llama_cpp or bool(body.normalize)
    )
    if is_llama_cpp:
        write = partial(_llama_cpp_json, encoded, in_form)
    else:
        write = partial(
            _openai_json,
            encoded,
            in_form,
            call.model.model_id,
            is_base64=body.encoding_format == "base64",
        )
    return json_response(await call.write(len(inputs) * encoder.dimensions, write))


def _openai_json(encoded: Encoded, in_form: VectorForm, model_id: str, *, is_base64: bool) -> bytes:
    answer = EmbeddingList(
        data=[
            Embedding(index=index, embedding=in_base64(one) if is_base64 else one.tolist())
            for index, one in enumerate(vectors_of(encoded, in_form))
        ],
        model=model_id,
        usage=EncoderUsage.of(encoded.prompt_tokens),
    )
    return msgspec.json.encode(answer)


def _llama_cpp_json(encoded: Encoded, in_form: VectorForm) -> bytes:
    answer = [
        LlamaCppEmbedding(index=index, embedding=[one.tolist()])
        for index, one in enumerate(vectors_of(encoded, in_form))
    ]
    return msgspec.json.encode(answer)
