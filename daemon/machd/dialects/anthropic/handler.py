"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from machd.dialects.anthropic.answer import Message, StreamEvent, TokenCount
from machd.dialects.anthropic.diagnostics import Comparison, fingerprint
from machd.dialects.anthropic.errors import AnthropicErrorBody
from machd.dialects.anthropic.request import CountTokensRequest, MessagesRequest
from machd.dialects.anthropic.stream import AnthropicDialect
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import converse, identify, read_conversation
from machd.generations.identity import GenerationIdentity
from machd.http.authentication import client_name
from machd.http.cold_stream import ColdRequest
from machd.http.context import ServerContext
from machd.http.stream import while_connected


def _cold(cold: ColdRequest) -> AnthropicDialect:
    """A dialect that writes pings and an error alone."""
    name = cold.name
    identity = identify(
        cold.request, cold.context, endpoint="messages", prefix="msg_", model_name=name
    )
    return AnthropicDialect(identity, name, shows_thoughts=False)


@endpoint(
    "POST /v1/messages",
    Message,
    takes=MessagesRequest,
    streams=StreamEvent,
    errors=(AnthropicErrorBody,),
    cold=_cold,
)
async def create_message(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Continue a conversation, in Anthropic's words."""
    body, conversation, context = await read_conversation(
        request, context, MessagesRequest, MessagesRequest.conversation
    )
    identity = identify(request, context, endpoint="messages", prefix="msg_")
    options = body.options()
    dialect = AnthropicDialect(
        identity,
        context.answer_name,
        shows_thoughts=body.shows_thoughts,
        tells_cache=body.tells_cache,
        comparison=await _comparison(context, identity, body),
    )
    preparing = context.service.prepare(
        conversation, client=identity.client, salt=options.cache_salt
    )
    return await converse(request, context, identity, preparing, options, dialect)


async def _comparison(
    context: ServerContext, identity: GenerationIdentity, body: MessagesRequest
) -> Comparison | None:
    """The comparison with an earlier request; None if the request asks for none."""
    if body.diagnostics is None:
        return None
    kept, previous_id = context.fingerprints, body.diagnostics.previous_message_id
    return Comparison(
        kept,
        identity,
        await context.service.in_worker(fingerprint, body, context.answer_name),
        asks=previous_id is not None,
        previous=None if previous_id is None else kept.get(identity.client, previous_id),
    )


@endpoint(
    "POST /v1/messages/count_tokens",
    TokenCount,
    takes=CountTokensRequest,
    errors=(AnthropicErrorBody,),
)
async def count_message_tokens(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> TokenCount:
    """Tokens of the prompt that a conversation would have."""
    _, conversation, context = await read_conversation(
        request, context, CountTokensRequest, CountTokensRequest.conversation
    )
    service = context.service
    prepared = await while_connected(
        request.receive, service.prepare(conversation, client=client_name(request.scope))
    )
    return TokenCount(input_tokens=len(prepared.prompt))
