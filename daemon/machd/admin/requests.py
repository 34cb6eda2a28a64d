"""Open requests for an operator: their clients and progress, never their texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import structlog
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import UNSET, Struct, UnsetType, structs

from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.errors import NotFoundError, OperatorAbortError
from machd.generations.encodings import Encoding
from machd.generations.generation import Generation
from machd.scheduler.events import DecodeMode


class OpenRequest(Struct, frozen=True, kw_only=True):
    """One open generation, or a request to an encoder.

    Attributes:
        id: The answer's id; unique.
        request_id: Of its X-Request-Id header; the client may have chosen it, and it need not be
            unique.
        endpoint: Such as ``chat_completions``.
        client: Name of the API key, or ``anonymous``.
        state: ``running`` once one of its sequences has a slot, and of an encoder always.
        age_s: Since it came.
        ttft_s: From then to its first token; null before that.
        prompt_tokens: Of all its prompts.
        prefilled_tokens: Of these, computed or found in the prefix cache so far.
        completion_tokens: Of all its completions, so far.
        decode_mode: Null while it waits, and of an encoder.
        model: Left out by a daemon of one model.
    """

    id: str
    request_id: str
    endpoint: str
    client: str
    state: Literal["waiting", "running"]
    age_s: float
    ttft_s: float | None
    prompt_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    decode_mode: DecodeMode | None
    model: str | UnsetType = UNSET


class OpenRequestList(Struct, frozen=True, kw_only=True):
    """The open requests, the oldest first."""

    requests: list[OpenRequest]


class AbortedRequests(Struct, frozen=True, kw_only=True):
    """The generations that an operator has ended.

    Asking twice does no harm: one that is on its way out is ended again, and one that has left is
    unknown.
    """

    aborted: list[str]


@endpoint("GET /admin/requests", OpenRequestList)
async def list_requests(admin: NamedDependency[AdminContext]) -> OpenRequestList:
    """The open requests: their clients and progress, never their texts.

    The oldest first.
    """
    now_s = admin.clock.monotonic_s()
    prefilled_tokens = {
        sequence_id: tokens
        for model in admin.models
        for sequence_id, tokens in model.served.snapshot.prefilled_tokens.items()
    }
    requests = [_open_request(one, now_s, prefilled_tokens) for one in admin.open_generations.all]
    requests += [_open_encoding(one, now_s) for one in admin.open_generations.encodings]
    requests.sort(key=lambda one: -one.age_s)
    if admin.models.is_one:
        requests = [structs.replace(one, model=UNSET) for one in requests]
    return OpenRequestList(requests=requests)


@endpoint("DELETE /admin/requests/{id}", AbortedRequests, also=(404,), id_as="request_id:str")
async def abort_requests(
    request_id: FromPath[str], admin: NamedDependency[AdminContext]
) -> AbortedRequests:
    """End the open requests of an X-Request-Id, or the one of an answer's id.

    Ending the same one again does no harm while its client has not been told yet; once it has,
    the id is unknown.
    """
    found = [
        one
        for one in admin.open_generations.requests
        if request_id in {one.identity.generation_id, one.identity.request_id}
        and not one.is_finished
    ]
    if not found:
        raise NotFoundError("no open request has this id")
    for one in found:
        one.fail(OperatorAbortError("an operator has ended this request"))
    aborted = [one.identity.generation_id for one in found]
    structlog.get_logger("machd.admin").warning("requests.aborted", ids=aborted)
    return AbortedRequests(aborted=aborted)


def _open_request(
    generation: Generation, now_s: float, prefilled_tokens: Mapping[str, int]
) -> OpenRequest:
    identity, usage = generation.identity, generation.usage
    admission, token_s = generation.admission, generation.first_token_s
    return OpenRequest(
        id=identity.generation_id,
        request_id=identity.request_id,
        endpoint=identity.endpoint,
        client=identity.client,
        state="waiting" if admission is None else "running",
        age_s=round(now_s - identity.arrived_s, 3),
        ttft_s=None if token_s is None else round(token_s - identity.arrived_s, 3),
        prompt_tokens=usage.prompt_tokens,
        prefilled_tokens=generation.prefilled_tokens(prefilled_tokens),
        completion_tokens=usage.completion_tokens,
        decode_mode=None if admission is None else admission.decode_mode,
        model=identity.model,
    )


def _open_encoding(encoding: Encoding, now_s: float) -> OpenRequest:
    identity = encoding.identity
    return OpenRequest(
        id=identity.generation_id,
        request_id=identity.request_id,
        endpoint=identity.endpoint,
        client=identity.client,
        state="running",
        age_s=round(now_s - identity.arrived_s, 3),
        ttft_s=None,
        prompt_tokens=encoding.prompt_tokens,
        prefilled_tokens=0,
        completion_tokens=0,
        decode_mode=None,
        model=identity.model,
    )
