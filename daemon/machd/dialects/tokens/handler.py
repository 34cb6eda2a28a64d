"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from litestar import Request
from litestar.di import NamedDependency

from machd.dialects.bodies import read_public_body
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import known
from machd.dialects.logprobs import token_text
from machd.dialects.tokens.request import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfoResponse,
)
from machd.engine.protocol.tokenizer import Tokenizer
from machd.http.authentication import client_name
from machd.http.context import ServerContext
from machd.http.stream import while_connected
from machd.reading.normalised_messages import NormalisedMessages
from machd.reading.prompt_rules import writes_date
from machd.reading.system_messages import merge_opening, place_system_messages
from machd.request.conversation import Conversation, template_tool
from machd.settings.cache import PromptRuleName
from machd.settings.models import DEFAULT_NAME


@endpoint("POST /tokenize", TokenizeResponse, takes=TokenizeRequest)
async def tokenize(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> TokenizeResponse:
    """Token ids of a text or a conversation."""
    body = await read_public_body(request, context, TokenizeRequest, takes_media=True)
    context = await known(request, context, body.model or DEFAULT_NAME)
    service = context.service
    conversation = await service.in_worker(_checked_conversation, body)
    if body.is_chat_prompt:
        prepared = await while_connected(
            request.receive, service.prepare(conversation, client=client_name(request.scope))
        )
        tokens = list(prepared.token_ids)
    else:
        run = service.in_worker if body.prompt is not None else service.in_chat_worker
        rules = context.served.prompt_rules
        tokens = await run(_tokenise, context.served.tokenizer, body, conversation, rules)
    texts = None
    if body.return_token_strs:
        texts = await service.in_worker(_texts, context.served.tokenizer, tokens)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=context.served.model.context_tokens,
        tokens=tokens,
        token_strs=texts,
    )


@endpoint("POST /detokenize", DetokenizeResponse, takes=DetokenizeRequest)
async def detokenize(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> DetokenizeResponse:
    """Text of token ids."""
    body = await read_public_body(request, context, DetokenizeRequest)
    context = await known(request, context, body.model or DEFAULT_NAME)
    service = context.service
    await service.in_worker(body.check_vocabulary, context.served.model.vocabulary_tokens)
    return DetokenizeResponse(
        prompt=await service.in_worker(context.served.tokenizer.decode, body.tokens)
    )


@endpoint("GET /tokenizer_info", TokenizerInfoResponse)
async def get_tokenizer_info(context: NamedDependency[ServerContext]) -> TokenizerInfoResponse:
    """Special tokens and chat template of the model."""
    service = context.service
    info = await service.in_worker(lambda: context.served.tokenizer.info)
    return TokenizerInfoResponse(
        tokenizer_class=info.class_name,
        model_max_length=context.served.model.context_tokens,
        chat_template=info.chat_template,
        bos_token=info.special_tokens.get("bos_token"),
        eos_token=info.special_tokens.get("eos_token"),
        pad_token=info.special_tokens.get("pad_token"),
        unk_token=info.special_tokens.get("unk_token"),
    )


def _checked_conversation(body: TokenizeRequest) -> Conversation:
    return body.checked().conversation()


def _tokenise(
    tokenizer: Tokenizer,
    body: TokenizeRequest,
    conversation: Conversation,
    rules: Collection[PromptRuleName],
) -> list[int]:
    text = body.prompt
    if text is None:
        text = _rendered(tokenizer, conversation, rules, opens_turn=body.add_generation_prompt)
    return tokenizer.encode(text, add_special_tokens=body.adds_special_tokens)


def _rendered(
    tokenizer: Tokenizer,
    conversation: Conversation,
    rules: Collection[PromptRuleName],
    *,
    opens_turn: bool,
) -> str:
    """A conversation in a way in which no chat completion renders it."""
    messages = NormalisedMessages(conversation.messages, rules).messages
    return tokenizer.render_chat(
        place_system_messages(merge_opening(messages), tokenizer.chat_format),
        add_generation_prompt=opens_turn,
        continue_final_message=conversation.continues_final_message,
        tools=[template_tool(one) for one in conversation.tools],
        variables=conversation.template_variables,
        writes_date=writes_date(tokenizer, rules),
    )


def _texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Each token's text; a long prompt has many tokens, but few different ones."""
    by_token = {one: token_text(one, tokenizer) for one in set(tokens)}
    return [by_token[one] for one in tokens]
