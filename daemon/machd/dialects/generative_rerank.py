"""Scores of documents by a model that generates text, for the endpoints that rank and score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from litestar import Request

from machd.dialects.generation import identify
from machd.generations.continuations import ContinuedPrompt, Reads, softmax
from machd.http.context import ServerContext
from machd.http.stream import while_connected
from machd.reading.rerank_prompt import rerank_prompts
from machd.request.generation import PriorityName


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of pairs of query and document.

    Attributes:
        scores: 0 to 1 each, in the pairs' order.
        prompt_tokens: Tokens of all prompts.
        cached_tokens: Those that the prefix cache had.
    """

    scores: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int


async def score_pairs(  # noqa: PLR0913 - one argument for each field of a request
    request: Request[Any, Any, Any],
    context: ServerContext,
    pairs: Sequence[tuple[str, str]],
    *,
    endpoint: str,
    instruction: str | None = None,
    prompt_param: str = "documents",
    priority: PriorityName = "normal",
    cache_salt: str | None = None,
) -> PairScores:
    """Score pairs of query and document, at least one, with the served model, a generative reranker.

    Args:
        request: The request, whose client may leave.
        context: Of the model, which the request holds.
        pairs: Query and document.
        endpoint: Name of the endpoint family, for records.
        instruction: What documents are judged by; None for the model's own.
        prompt_param: The request field that the documents came from, for errors about them.
        priority: Place among the requests that wait.
        cache_salt: The client's salt, which separates cache namespaces.

    Raises:
        ClientDisconnectedError: The client left.
        MachdError: As of :meth:`machd.generations.service.GenerationService.open`; or the model failed.
    """
    reranker, service = context.served.model.reranker, context.service
    assert reranker is not None, "the served model is a generative reranker"
    in_thread = service.in_chat_worker if reranker.has_template else service.in_worker
    prompts = await in_thread(
        rerank_prompts, reranker, context.served.tokenizer, pairs, instruction
    )
    answers = tuple(((one,),) for one in (reranker.true_token_id, reranker.false_token_id))
    reads = Reads([ContinuedPrompt(one, answers) for one in prompts])
    identity = identify(request, context, endpoint=endpoint, prefix="rerank-")

    async def compute() -> PairScores:
        # Nothing is awaited between the opening and the wait that closes it.
        generation = service.open(
            reads.prompts,
            reads.options(priority=priority, cache_salt=cache_salt),
            identity,
            prompt_param=prompt_param,
        )
        logprobs = await reads.scores(generation)
        usage = generation.usage
        return PairScores(
            tuple(softmax(one)[0] for one in logprobs), usage.prompt_tokens, usage.cached_tokens
        )

    return await while_connected(request.receive, compute())
