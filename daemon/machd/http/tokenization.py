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
    tokens, texts = await service.in_worker(_tokenise, service.tokenizer, body)
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


def _tokenise(tokenizer: Tokenizer, body: TokenizeRequest) -> tuple[list[int], list[str] | None]:
    if body.messages is None:
        text = body.prompt or ""
    else:
        text = tokenizer.render_chat(
            body.template_messages(), add_generation_prompt=body.add_generation_prompt
        )
    tokens = tokenizer.encode(text, add_special_tokens=body.adds_special_tokens)
    texts = [token_text(one, tokenizer) for one in tokens] if body.return_token_strs else None
    return tokens, texts
