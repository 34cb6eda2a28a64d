"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Any, TypeVar

from litestar import Request, post
from litestar.di import NamedDependency
from litestar.types import ASGIApp

from machd.api.anthropic_message import TokenCount
from machd.api.anthropic_request import CountTokensRequest, MessagesRequest
from machd.api.conversation import Conversation
from machd.http.anthropic_dialect import AnthropicDialect
from machd.http.bodies import check_model, read_body
from machd.http.context import ServerContext
from machd.http.generations import identify, respond

__all__ = ["count_message_tokens", "create_message"]

_B = TypeVar("_B", CountTokensRequest, MessagesRequest)


@post("/v1/messages", status_code=200)
async def create_message(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Continue a conversation, in Anthropic's words."""
    body, conversation = await _read(request, context, MessagesRequest)
    service = context.service
    prepared = await service.prepare(conversation)
    identity = identify(request, context, endpoint="messages", prefix="msg_")
    return respond(
        context,
        identity,
        [prepared.prompt],
        body.options(),
        AnthropicDialect(
            identity,
            service.model.model_id,
            prompt_tokens=len(prepared.prompt),
            shows_thoughts=body.shows_thoughts,
        ),
        prompt_param="messages",
        guidance=prepared.guidance,
    )


@post("/v1/messages/count_tokens", status_code=200)
async def count_message_tokens(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> TokenCount:
    """Tokens of the prompt that a conversation would have."""
    _, conversation = await _read(request, context, CountTokensRequest)
    service = context.service
    prepared = await service.prepare(conversation)
    return TokenCount(input_tokens=len(prepared.prompt))


async def _read(
    request: Request[Any, Any, Any], context: ServerContext, type_: type[_B]
) -> tuple[_B, Conversation]:
    """Read a body and hold it against the daemon and its model.

    Raises:
        RequestError: It is wrong, by itself or for this model.
        UnavailableError: No new work is taken.
    """
    timeout_s = context.settings.limits.stall_timeout_s
    body = (await read_body(request, type_, timeout_s=timeout_s)).checked()
    conversation = body.conversation()
    context.service.lifecycle.check_accepting()
    check_model(body.model, context.service.model.model_id)
    return body, conversation
