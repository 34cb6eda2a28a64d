"""``/v1/responses``: create one, look at one, forget one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.types import ASGIApp

from machd.dialects.endpoint import endpoint
from machd.dialects.generation import converse, identify, read_generation, with_model_defaults
from machd.dialects.responses.answer import DeletedResponse, OutputItem, ResponseEvent
from machd.dialects.responses.answer import Response as WireResponse
from machd.dialects.responses.items import ItemChain
from machd.dialects.responses.request import ResponsesRequest
from machd.dialects.responses.stream import KeepResponse, ResponsesDialect, opened_response
from machd.errors import NotFoundError, UnsupportedParameterError
from machd.generations.identity import GenerationIdentity
from machd.generations.response_store import ResponseStore, StoredResponse, Turn
from machd.http.authentication import client_name
from machd.http.cold_stream import ColdRequest
from machd.http.context import ServerContext
from machd.request.conversation import Conversation

_NOT_STORED = (
    "no such response is stored here; it may have been made with store: false, with another API "
    "key or before a restart, or dropped for want of room (limits.max_stored_responses, "
    "limits.max_stored_response_bytes)"
)


def _cold(cold: ColdRequest) -> ResponsesDialect:
    """A dialect that writes comments, or a response that begins and fails."""
    body, name = cold.body, cold.name
    assert isinstance(body, ResponsesRequest), "the endpoint takes nothing else"
    identity = identify(
        cold.request, cold.context, endpoint="responses", prefix="resp_", model_name=name
    )
    return ResponsesDialect(
        opened_response(body, body.options(), identity, name),
        logprobs_from=None,
        clock=cold.context.clock,
        keep=_forget,
    )


@endpoint(
    "POST /v1/responses",
    WireResponse,
    takes=ResponsesRequest,
    streams=ResponseEvent,
    cold=_cold,
)
async def create_response(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Answer, perhaps after an earlier response."""
    body, context = await read_generation(request, context, ResponsesRequest)
    service = context.service
    client = client_name(request.scope)
    previous, referenced = _stored_items(context.responses, client, body)
    chain, conversation = await service.in_worker(_continued, body, previous, referenced)
    identity = identify(request, context, endpoint="responses", prefix="resp_")
    kinds = body.left_out_kinds
    if kinds:
        # The words are of a fixed table, never the client's own.
        structlog.get_logger("machd.http").debug(
            "request.tools_left_out", request_id=identity.request_id, kinds=kinds
        )
    options = with_model_defaults(context, body.options())
    dialect = ResponsesDialect(
        opened_response(body, options, identity, context.answer_name),
        logprobs_from=context.served.tokenizer
        if options.sampling.top_logprobs is not None
        else None,
        clock=context.clock,
        keep=_keeper(context.responses, identity, previous, chain) if body.is_stored else _forget,
        tells_cache=options.includes_cache_diagnosis,
    )
    return await converse(
        request,
        context,
        identity,
        service.prepare(conversation, client=client, salt=options.cache_salt),
        options,
        dialect,
        prompt_param="input",
        dropped_tools=kinds,
    )


@endpoint("GET /v1/responses/{id}", WireResponse, also=(400, 404), id_as="response_id:str")
async def get_response(
    request: Request[Any, Any, Any],
    context: NamedDependency[ServerContext],
    response_id: FromPath[str],
) -> Response[bytes]:
    """A stored response."""
    if request.query_params.get("stream", "false") != "false":
        raise UnsupportedParameterError.at(
            "stream", "a stored response is not streamed again; leave it out"
        )
    context.service.lifecycle.check_accepting()
    found = context.responses.get(client_name(request.scope), response_id)
    if found is None:
        raise NotFoundError(_NOT_STORED, param="response_id")
    return Response(found.answer, media_type="application/json")


@endpoint("DELETE /v1/responses/{id}", DeletedResponse, also=(404,), id_as="response_id:str")
async def delete_response(
    request: Request[Any, Any, Any],
    context: NamedDependency[ServerContext],
    response_id: FromPath[str],
) -> DeletedResponse:
    """Forget a stored response.

    Those that continue it hold what they need of it themselves.
    """
    context.service.lifecycle.check_accepting()
    if not context.responses.delete(client_name(request.scope), response_id):
        raise NotFoundError(_NOT_STORED, param="response_id")
    return DeletedResponse(id=response_id)


def _stored_items(
    store: ResponseStore, client: str, body: ResponsesRequest
) -> tuple[Turn | None, dict[str, bytes]]:
    """The turn before the request's own, and the items that it refers to.

    Raises:
        NotFoundError: ``previous_response_id`` names nothing that is stored.
    """
    previous: Turn | None = None
    if body.previous_response_id is not None:
        found = store.get(client, body.previous_response_id)
        if found is None:
            raise NotFoundError(
                f"previous_response_id: {_NOT_STORED}", param="previous_response_id"
            )
        previous = found.turn
    referenced = {
        item_id: item
        for item_id in body.referenced_ids
        if (item := store.item(client, item_id)) is not None
    }
    return previous, referenced


def _continued(
    body: ResponsesRequest, previous: Turn | None, referenced: dict[str, bytes]
) -> tuple[ItemChain, Conversation]:
    """The whole conversation, for a worker thread: there may be thousands of items."""
    before = () if previous is None else previous.conversation()
    chain = body.chain(previous=before, referenced=referenced)
    return chain, body.continued(chain)


def _keeper(
    store: ResponseStore, identity: GenerationIdentity, previous: Turn | None, chain: ItemChain
) -> KeepResponse:
    def keep(answer: bytes, output: Sequence[OutputItem]) -> None:
        made = tuple(msgspec.json.encode(item) for item in output)
        turn = Turn((*chain.added, *made), previous)
        store.put(
            identity.client,
            identity.generation_id,
            StoredResponse(answer, turn, tuple(item.id for item in output)),
        )

    return keep


def _forget(_answer: bytes, _output: Sequence[OutputItem]) -> None:
    """Keep nothing, as ``store: false`` asks."""
