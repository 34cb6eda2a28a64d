"""``POST /v1/embeddings``, ``POST /embedding`` and ``POST /embed``.

llama.cpp's clients send ``content`` or ask ``/embedding``, and those of text-embeddings-inference (TEI) send ``inputs`` or ask
``/embed``: they get lists. All others get OpenAI's object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Request
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from machd.dialects.embeddings.answer import (
    Embedding,
    EmbeddingList,
    LlamaCppEmbedding,
)
from machd.dialects.embeddings.request import AnswerForm, EmbeddingsRequest
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
from machd.engine.protocol.encoder import EncoderInput, EncoderTask, InputTokenizer
from machd.http.context import ServerContext
from machd.reading.input_prompts import input_prompt
from machd.reading.vectors import in_base64


@endpoint(
    "POST /v1/embeddings",
    EmbeddingList,
    list[LlamaCppEmbedding],
    list[list[float]],
    takes=EmbeddingsRequest,
    also=OVERLOADS,
)
async def create_embeddings(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Vectors of texts."""
    body, call = await hold_encoder(request, context, EmbeddingsRequest)
    return await _embed(body, call, body.form)


@endpoint("POST /embedding", list[LlamaCppEmbedding], takes=EmbeddingsRequest, also=OVERLOADS)
async def create_llama_cpp_embeddings(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Vectors of texts, in llama.cpp's words."""
    body, call = await hold_encoder(request, context, EmbeddingsRequest)
    return await _embed(body, call, AnswerForm.LLAMA_CPP)


@endpoint("POST /embed", list[list[float]], takes=EmbeddingsRequest, also=OVERLOADS)
async def create_tei_embeddings(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Vectors of texts, in the words of text-embeddings-inference."""
    body, call = await hold_encoder(request, context, EmbeddingsRequest)
    return await _embed(body, call, AnswerForm.TEI)


async def _embed(body: EmbeddingsRequest, call: EncoderCall, form: AnswerForm) -> ASGIApp:
    encoder = require(call.model, EncoderTask.EMBED)
    inputs = body.input_list()
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
            truncates=call.truncates,
            param=body.inputs_param,
        )

    encoded = await call.encode(
        make,
        identify(call.request, call.context, endpoint="embeddings", prefix="embd-"),
    )
    normalises = form is not AnswerForm.OPENAI if body.normalize is None else body.normalize
    in_form = vector_form(encoder, dimensions=body.dimensions, normalises=normalises)
    vectors = enumerate(vectors_of(encoded, in_form))
    if form is AnswerForm.LLAMA_CPP:
        items = (LlamaCppEmbedding(index=index, embedding=[one.tolist()]) for index, one in vectors)
        return await vectors_response(b"[", items, b"]", dimensions=encoder.dimensions)
    if form is AnswerForm.TEI:
        lists = (one.tolist() for _, one in vectors)
        return await vectors_response(b"[", lists, b"]", dimensions=encoder.dimensions)
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
