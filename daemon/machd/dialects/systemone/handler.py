"""``POST /v1/systemone``."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.di import NamedDependency

from machd.dialects.endpoint import endpoint
from machd.dialects.generation import identify, read_generation
from machd.dialects.systemone.answer import DecisionErrorBody, Decisions, DecisionUsage
from machd.dialects.systemone.questions import Question
from machd.dialects.systemone.request import SystemOneRequest
from machd.engine.protocol.tokenizer import Tokenizer
from machd.generations.continuations import ContinuedPrompt, Reads
from machd.http.context import ServerContext
from machd.http.stream import while_connected
from machd.reading.shared_prompt import shared_prompts


@endpoint(
    "POST /v1/systemone",
    Decisions,
    takes=SystemOneRequest,
    also=(429, 504),
    errors=(DecisionErrorBody,),
)
async def decide(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> Decisions:
    """Answer typed questions about a state with a probability for each option."""
    body, context = await read_generation(request, context, SystemOneRequest)
    service, temperature = context.service, body.temperature or 1.0
    questions, prompts = await service.in_chat_worker(_prompts, body, context.served.tokenizer)
    reads = Reads(prompts)
    identity = identify(request, context, endpoint="systemone", prefix="decision-")

    async def compute() -> Decisions:
        # Nothing is awaited between the opening and the wait that closes it.
        generation = service.open(
            reads.prompts,
            reads.options(priority=body.priority_name, cache_salt=body.cache_salt),
            identity,
            prompt_param="state",
        )
        scores = await reads.scores(generation)
        usage = generation.usage
        return Decisions(
            id=identity.generation_id,
            model=context.answer_name,
            answers={
                one.question_id: one.answer(logprobs, temperature)
                for one, logprobs in zip(questions, scores, strict=True)
            },
            usage=DecisionUsage(
                input_tokens=usage.prompt_tokens,
                output_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
            ),
        )

    return await while_connected(request.receive, compute())


def _prompts(
    body: SystemOneRequest, tokenizer: Tokenizer
) -> tuple[list[Question], list[ContinuedPrompt]]:
    state, questions = body.asked()
    prompts = shared_prompts(tokenizer, state, [one.text for one in questions])
    return questions, [
        ContinuedPrompt(prompt, one.continuations(tokenizer))
        for one, prompt in zip(questions, prompts, strict=True)
    ]
