"""``POST /v1/rerank``, ``POST /v2/rerank``, ``POST /v1/score`` and ``POST /v1/classify``.

Scores come from a cross-encoder, a classifier of pairs with one label, or from a reranker that generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from msgspec import UNSET

from machd.dialects.encoding import (
    OVERLOADS,
    EncoderCall,
    check_inputs,
    hold_encoder,
    json_response,
)
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import identify
from machd.dialects.generative_rerank import score_pairs
from machd.dialects.input_making import beginning, make_inputs, make_pairs
from machd.dialects.model_kinds import require
from machd.dialects.scoring.answer import (
    ApiVersion,
    Classification,
    ClassificationList,
    RankedDocument,
    RerankAnswer,
    RerankMeta,
    RerankResult,
    RerankTokens,
    Score,
    ScoreList,
    TeiRank,
)
from machd.dialects.scoring.request import (
    ClassifyRequest,
    RerankRequest,
    ScoreRequest,
    ScoringRequest,
)
from machd.dialects.wire.encoder_usage import EncoderUsage
from machd.engine.protocol.encoder import Activation, EncoderDescription, EncoderTask
from machd.errors import UnsupportedParameterError
from machd.generations.encodings import Encoded
from machd.generations.identity import GenerationIdentity
from machd.http.context import ServerContext
from machd.reading.vectors import activated, rows_of


@endpoint("POST /v1/rerank", RerankAnswer, list[TeiRank], takes=RerankRequest, also=OVERLOADS)
async def create_rerank(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> Response[bytes]:
    """Documents in the order of their relevance, in the words of Cohere, Jina and text-embeddings-inference."""
    return await _rerank(request, context, version="1")


@endpoint("POST /v2/rerank", RerankAnswer, list[TeiRank], takes=RerankRequest, also=OVERLOADS)
async def create_rerank_v2(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> Response[bytes]:
    """Documents in the order of their relevance, at the path of Cohere's second API."""
    return await _rerank(request, context, version="2")


@endpoint("POST /v1/score", ScoreList, takes=ScoreRequest, also=OVERLOADS)
async def create_score(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> Response[bytes]:
    """How well texts match, in vLLM's words."""
    body, call = await hold_encoder(request, context, ScoreRequest)
    pairs = body.pairs()
    check_inputs(call.context, pairs, param=body.param)
    identity = identify(request, call.context, endpoint="score", prefix="score-")
    scored = await _score(call, body, pairs, identity, param=body.param)
    answer = ScoreList(
        id=identity.generation_id,
        created=identity.created_unix_s,
        model=call.context.answer_name,
        data=[Score(index=index, score=one) for index, one in enumerate(scored.scores)],
        usage=EncoderUsage.of(scored.prompt_tokens),
    )
    return json_response(msgspec.json.encode(answer))


@endpoint("POST /v1/classify", ClassificationList, takes=ClassifyRequest, also=OVERLOADS)
async def create_classification(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> Response[bytes]:
    """Classes of texts, in vLLM's words."""
    body, call = await hold_encoder(request, context, ClassifyRequest)
    encoder = require(call.model, EncoderTask.CLASSIFY)
    check_inputs(call.context, body.texts, param="input")
    identity = identify(request, call.context, endpoint="classify", prefix="classify-")
    encoded = await call.encode(
        partial(
            make_inputs,
            inputs=body.texts,
            prompt="",
            truncates=call.truncates,
            param="input",
        ),
        identity,
    )
    activation = Activation.NONE if body.use_activation is False else encoder.activation
    write = partial(_classes_json, encoded, encoder, activation, call.model.model_id, identity)
    return json_response(await call.write(len(body.texts) * encoder.dimensions, write))


async def _rerank(
    request: Request[Any, Any, Any], context: ServerContext, *, version: Literal["1", "2"]
) -> Response[bytes]:
    # The rerankers of Cohere, Jina and text-embeddings-inference cut documents that are too long.
    body, call = await hold_encoder(request, context, RerankRequest, truncates=True)
    documents, param = body.document_texts, body.documents_param
    check_inputs(call.context, documents, param=param)
    texts: Sequence[str] = documents
    if body.max_tokens_per_doc is not None:
        cut = partial(_cut, call, documents, body.max_tokens_per_doc)
        texts = await call.context.service.in_worker(cut)
    identity = identify(request, call.context, endpoint="rerank", prefix="rerank-")
    pairs = [(body.query, one) for one in texts]
    scored = await _score(call, body, pairs, identity, param=param)
    ranks = ranked(scored.scores, body.top_n)
    shows = body.gives_documents
    if body.is_tei:
        return json_response(
            msgspec.json.encode(
                [
                    TeiRank(
                        index=index,
                        score=scored.scores[index],
                        text=documents[index] if shows else UNSET,
                    )
                    for index in ranks
                ]
            )
        )
    answer = RerankAnswer(
        id=identity.generation_id,
        model=call.context.answer_name,
        results=[
            RerankResult(
                index=index,
                relevance_score=scored.scores[index],
                document=RankedDocument(text=documents[index]) if shows else UNSET,
            )
            for index in ranks
        ],
        usage=EncoderUsage.of(scored.prompt_tokens),
        meta=RerankMeta(
            api_version=ApiVersion(version=version),
            tokens=RerankTokens(input_tokens=scored.prompt_tokens),
        ),
    )
    return json_response(msgspec.json.encode(answer))


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of pairs in their order, and the tokens of all."""

    scores: Sequence[float]
    prompt_tokens: int


async def _score(
    call: EncoderCall,
    body: ScoringRequest,
    pairs: Sequence[tuple[str, str]],
    identity: GenerationIdentity,
    *,
    param: str,
) -> Scored:
    """Score pairs of texts.

    Raises:
        UnsupportedParameterError: The model scores no pairs.
        MachdError: As of :meth:`EncoderCall.encode`.
    """
    if call.model.reranker is not None:
        return await _judge(call, body, pairs, identity, param=param)
    encoder = require(call.model, EncoderTask.CLASSIFY)
    if not encoder.scores_pairs:
        raise UnsupportedParameterError.at(
            "model",
            f"this model tells {encoder.dimensions} classes apart, and a score has one; ask /v1/classify, or a "
            "reranker",
        )
    if body.instruction is not None:
        raise UnsupportedParameterError.at(
            "instruction", "this model is a cross-encoder, which reads none; leave it out"
        )
    make = partial(make_pairs, pairs=pairs, truncates=call.truncates, param=param)
    encoded = await call.encode(make, identity)
    activation = Activation.NONE if body.wants_logits else encoder.activation
    scores = [activated(one, activation)[0] for one in rows_of(encoded.values)]
    return Scored([scores[place] for place in encoded.places], encoded.prompt_tokens)


async def _judge(
    call: EncoderCall,
    body: ScoringRequest,
    pairs: Sequence[tuple[str, str]],
    identity: GenerationIdentity,
    *,
    param: str,
) -> Scored:
    """Score pairs with a model that generates the word for whether they match."""
    if body.wants_logits:
        raise UnsupportedParameterError.at(
            "raw_scores" if body.use_activation is None else "use_activation",
            "this model gives probabilities and no logits; leave it out",
        )
    judged = await score_pairs(
        call.request,
        call.context,
        pairs,
        endpoint=identity.endpoint,
        instruction=body.instruction,
        prompt_param=param,
    )
    return Scored(judged.scores, judged.prompt_tokens)


def ranked(scores: Sequence[float], top_n: int | None) -> list[int]:
    """Return the places of the highest scores, the highest first; equal ones keep their order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return order[:top_n] if top_n else order


def _cut(call: EncoderCall, texts: Sequence[str], max_tokens: int) -> list[str]:
    tokenizer = call.context.served.tokenizer
    return [beginning(tokenizer, one, max_tokens) for one in texts]


def _classes_json(
    encoded: Encoded,
    encoder: EncoderDescription,
    activation: Activation,
    model_id: str,
    identity: GenerationIdentity,
) -> bytes:
    rows = [activated(one, activation) for one in rows_of(encoded.values)]
    answer = ClassificationList(
        id=identity.generation_id,
        created=identity.created_unix_s,
        model=model_id,
        data=[
            Classification(
                index=index,
                label=encoder.labels[max(range(len(rows[place])), key=rows[place].__getitem__)],
                probs=rows[place],
                num_classes=len(rows[place]),
            )
            for index, place in enumerate(encoded.places)
        ],
        usage=EncoderUsage.of(encoded.prompt_tokens),
    )
    return msgspec.json.encode(answer)
