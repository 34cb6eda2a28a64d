"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Any

from litestar import Request, post
from litestar.di import NamedDependency

from machd.api.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from machd.api.tools import template_tool
from machd.engine.protocol import Tokenizer
from machd.http.bodies import check_model, read_body
from machd.http.context import ServerContext
from machd.http.logprobs import token_text

__all__ = ["detokenize", "tokenize"]


@post("/tokenize", status_code=200)
async def tokenize(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> TokenizeResponse:
    """Token ids of a text or a conversation."""
    body = (
        await read_body(request, TokenizeRequest, timeout_s=context.settings.limits.stall_timeout_s)
    ).checked()
    service = context.service
    check_model(body.model, service.model.model_id)
    if body.is_chat_prompt:
        tokens = list((await service.prepare(body.conversation())).prompt)
    else:
        tokens = await service.in_worker(_tokenise, service.tokenizer, body)
    texts = None
    if body.return_token_strs:
        texts = [token_text(one, service.tokenizer) for one in tokens]
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=service.model.context_tokens,
        tokens=tokens,
        token_strs=texts,
    )


@post("/detokenize", status_code=200)
async def detokenize(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> DetokenizeResponse:
    """Text of token ids."""
    body = await read_body(
        request, DetokenizeRequest, timeout_s=context.settings.limits.stall_timeout_s
    )
    service = context.service
    check_model(body.model, service.model.model_id)
    body.check_vocabulary(service.model.vocabulary_tokens)
    return DetokenizeResponse(prompt=await service.in_worker(service.tokenizer.decode, body.tokens))


def _tokenise(tokenizer: Tokenizer, body: TokenizeRequest) -> list[int]:
    text = body.prompt if body.prompt is not None else _rendered(tokenizer, body)
    return tokenizer.encode(text, add_special_tokens=body.adds_special_tokens)


def _rendered(tokenizer: Tokenizer, body: TokenizeRequest) -> str:
    """A conversation in a way in which no chat completion renders it."""
    conversation = body.conversation()
    return tokenizer.render_chat(
        conversation.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=conversation.continues_final_message,
        tools=[template_tool(one) for one in conversation.tools],
        variables=conversation.template_variables,
    )
