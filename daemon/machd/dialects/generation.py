"""Parts that generating endpoints share: reading a request, identity, fingerprint, opening the answer."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from math import isinf
from typing import Any, TypeVar

from litestar import Request

from machd.capabilities.versions import Versions
from machd.dialects.bodies import read_public_body
from machd.dialects.model_kinds import require_generating
from machd.dialects.wire.bounds import MAX_PROMPT_LOGPROBS
from machd.dialects.wire.generation_request import GenerationRequest
from machd.engine.protocol.engine import ModelDescription
from machd.errors import InvalidRequestError
from machd.generations.generation import GenerationIdentity
from machd.generations.trace_context import new_trace
from machd.http.authentication import client_name, is_operator
from machd.http.cold_stream import ColdRequest, note_cold
from machd.http.context import ServerContext
from machd.http.leases import note_model
from machd.http.stamps import arrived_s, request_id, trace_context
from machd.http.stream import Dialect, GenerationResponse, StreamPolicy, while_connected
from machd.http.told_progress import TellProgress
from machd.reading.conversation import PreparedConversation
from machd.reading.guidance import NO_GUIDANCE, Guidance
from machd.request.adapter import Adapter, NumberedAdapter, adapter_namespace
from machd.request.constraint import Constraint
from machd.request.conversation import Conversation
from machd.request.generation import GenerationOptions
from machd.served.named_model import NamedModel

_ANY_VOCABULARY = sys.maxsize
"""Tokens of a vocabulary that has every token id, for a model that is not known yet."""

_R = TypeVar("_R", bound=GenerationRequest)
_T = TypeVar("_T")


async def read_generation(
    request: Request[Any, Any, Any], context: ServerContext, type_: type[_R]
) -> tuple[_R, ServerContext]:
    """Read a request for a generation and hold it against the daemon and its model, whose context comes with it.

    Raises:
        RequestError: It is wrong, by itself or for this model.
        UnavailableError: No new work is taken, or none of this client's.
    """
    return await _read(request, context, type_, _checked)


async def read_conversation(
    request: Request[Any, Any, Any],
    context: ServerContext,
    type_: type[_R],
    conversation_of: Callable[[_R], Conversation],
) -> tuple[_R, Conversation, ServerContext]:
    """Read a request that holds its whole conversation, as :func:`read_generation`."""

    def check(body: _R, vocabulary_tokens: int) -> tuple[_R, Conversation]:
        checked = _checked(body, vocabulary_tokens)
        return checked, conversation_of(checked)

    (body, conversation), context = await _read(request, context, type_, check)
    return body, conversation, context


def identify(
    request: Request[Any, Any, Any],
    context: ServerContext,
    *,
    endpoint: str,
    prefix: str,
    model_name: str | None = None,
) -> GenerationIdentity:
    """Name a request's generation.

    ``prefix`` is what its id begins with, such as ``chatcmpl-``; ``model_name`` stands for the id of a model that was
    never loaded.
    """
    trace = trace_context(request.scope)
    if trace is None and context.settings.tracing.otlp_endpoint is not None:
        trace = new_trace()
    return GenerationIdentity(
        generation_id=f"{prefix}{secrets.token_hex(14)}",
        request_id=request_id(request.scope),
        endpoint=endpoint,
        client=client_name(request.scope),
        arrived_s=arrived_s(request.scope),
        created_unix_s=int(context.clock.unix_s()),
        model=context.served.model.model_id if model_name is None else model_name,
        trace=trace,
        adapters=context.chosen,
    )


async def converse(  # noqa: PLR0913 - one argument for each part of an answer
    request: Request[Any, Any, Any],
    context: ServerContext,
    identity: GenerationIdentity,
    preparing: Coroutine[object, object, PreparedConversation],
    options: GenerationOptions,
    dialect: Dialect,
    *,
    prompt_param: str = "messages",
    dropped_tools: Sequence[str] = (),
    tell_progress: TellProgress | None = None,
) -> GenerationResponse:
    """Answer a conversation once it is prepared; a client that leaves before ends that.

    ``preparing`` makes a prompt of the conversation; the rest is as of :func:`respond`.

    Raises:
        ClientDisconnectedError: The client left.
        MachdError: As of :meth:`machd.generations.service.GenerationService.prepare` and :func:`respond`.
    """
    prepared = await while_connected(request.receive, preparing)
    return respond(
        context,
        identity,
        [prepared],
        options,
        dialect,
        prompt_param=prompt_param,
        dropped_tools=dropped_tools,
        tell_progress=tell_progress,
    )


def respond(  # noqa: PLR0913 - one argument for each part of an answer
    context: ServerContext,
    identity: GenerationIdentity,
    prepared: Sequence[PreparedConversation],
    options: GenerationOptions,
    dialect: Dialect,
    *,
    prompt_param: str,
    dropped_tools: Sequence[str] = (),
    tell_progress: TellProgress | None = None,
) -> GenerationResponse:
    """Open the generation and hand it to the response that will own it.

    Nothing is awaited in between, so a client that leaves cannot leave a generation behind.

    There are several prompts of a text completion alone, which have the same guidance and no media.
    Headers name what is dropped and count what is omitted; ``prompt_param`` is named in errors about prompts.
    ``tell_progress`` writes an event of the prompts' progress, which is told if the request asks for it.

    Raises:
        InvalidRequestError: The request asks for more than limits, context or bounds allow.
        UnavailableError: No new work is taken.
    """
    first, prompts = prepared[0], [one.prompt for one in prepared]
    _check_prompt_logprobs(prompts, options)
    options = with_model_defaults(context, options)
    settings = context.settings
    return GenerationResponse(
        context.service.open(
            prompts,
            options,
            identity,
            prompt_param=prompt_param,
            guidance=first.guidance,
            media=first.media,
            places=first.places,
        ),
        dialect,
        StreamPolicy(
            interval_tokens=options.stream_interval or settings.streaming.interval,
            keepalive_s=settings.streaming.keepalive_s,
            pause=context.service.pause,
            snapshot=lambda: context.served.snapshot,
            clock=context.clock,
        ),
        is_stream=options.stream,
        notes=_notes(first, dropped_tools),
        tell_progress=tell_progress if options.tells_progress else None,
    )


async def compiled(
    request: Request[Any, Any, Any], context: ServerContext, constraint: Constraint | None
) -> Guidance:
    """Compile the constraint of a text's completion, if it has one.

    Raises:
        ClientDisconnectedError: The client left.
        MachdError: As of :meth:`machd.generations.service.GenerationService.compile`.
    """
    if constraint is None:
        return NO_GUIDANCE
    compiling = context.service.compile(constraint, client=client_name(request.scope))
    return Guidance(grammar=await while_connected(request.receive, compiling))


def with_model_defaults(context: ServerContext, options: GenerationOptions) -> GenerationOptions:
    """Return the options with the checkpoint's own defaults for what the request leaves unsaid."""
    return options.with_defaults(context.served.model.default_sampling.named)


def _notes(
    prepared: PreparedConversation, dropped_tools: Sequence[str]
) -> list[tuple[bytes, bytes]]:
    """Headers that say what of the request was left out."""
    notes = []
    if dropped_tools:
        notes.append((b"x-dropped-tools", ", ".join(dropped_tools).encode()))
    if prepared.omitted_media:
        notes.append((b"x-omitted-images", str(prepared.omitted_media).encode()))
    grammar = prepared.guidance.grammar
    if grammar is not None and grammar.ignored_keywords:
        notes.append((b"x-ignored-schema-keywords", ", ".join(grammar.ignored_keywords).encode()))
    if prepared.dropped_messages:
        notes.append((b"x-dropped-messages", str(prepared.dropped_messages).encode()))
    return notes


def _check_prompt_logprobs(prompts: Sequence[tuple[int, ...]], options: GenerationOptions) -> None:
    """Raise InvalidRequestError where the answer would say more of prompts than ``MAX_PROMPT_LOGPROBS``."""
    if options.sampling.prompt_logprobs is None:
        return
    tokens = sum(len(prompt) for prompt in prompts) * options.n
    asked = tokens * (1 + options.sampling.prompt_logprobs)
    if asked > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"the prompts' log-probabilities would be {asked}, alternatives included, and one "
            f"answer holds {MAX_PROMPT_LOGPROBS}; send fewer prompts or ask for fewer alternatives",
            param="prompt_logprobs",
        )


async def _read(
    request: Request[Any, Any, Any],
    context: ServerContext,
    type_: type[_R],
    check: Callable[[_R, int], _T],
) -> tuple[_T, ServerContext]:
    """Read a body and check it off the event loop; a draining daemon or another model come first.

    The model that it asks for is loaded if it has to be, and held until the answer has ended.

    Args:
        request: To read from.
        context: What is served.
        type_: Of the body.
        check: Gets the body and the tokens of the model's vocabulary.
    """
    body = await read_asked(request, context, type_)
    return await _held(request, context, body, check)


async def hold(
    request: Request[Any, Any, Any], context: ServerContext, body: _R
) -> tuple[_R, ServerContext]:
    """Hold the model that a body asks for, and the body against it; see :func:`read_generation`."""
    return await _held(request, context, body, _checked)


async def _held(
    request: Request[Any, Any, Any],
    context: ServerContext,
    body: _R,
    check: Callable[[_R, int], _T],
) -> tuple[_T, ServerContext]:
    idle_s = None if context.models.is_one else body.idle_s
    model = context.find(body.model)
    if not model.is_ready:
        if (front := model.served.link.front) is not None:
            require_generating(front.model)
        # What is wrong by itself loads no model.
        await context.service.in_worker(check, body, _ANY_VOCABULARY)
    streamed = body if body.is_stream else None
    context = await leased(request, context, body.model, streamed, numbered=body.listed_adapters())
    require_generating(context.served.model)
    checked = await context.service.in_worker(check, body, context.served.model.vocabulary_tokens)
    if idle_s is not None and is_operator(request.scope):
        keep_loaded(context, model, idle_s)
    return checked, context


async def read_asked(
    request: Request[Any, Any, Any], context: ServerContext, type_: type[_R]
) -> _R:
    """Read a body for a model that is served, and hold neither the body against it nor the model.

    Raises:
        RequestError: It is wrong by itself, or names no model that is served.
        UnavailableError: No new work is taken, or none of this client's.
    """
    body = await read_public_body(request, context, type_, takes_media=type_.takes_media)
    service = context.service
    service.lifecycle.check_accepting()
    note_model(request.scope, context.find(body.model).name)
    if type_.uses_tokens:
        # Before any work is done for it; counting uses no tokens.
        service.check_client(client_name(request.scope))
    return body


def keep_loaded(context: ServerContext, model: NamedModel, idle_s: float) -> None:
    """Have a model unloaded after so many idle seconds from now on: 0 as soon as it is idle, infinity never.

    One that its table pins stays loaded.
    """
    table = context.settings.models.tables.get(model.name)
    if table is not None and table.pin:
        return
    if idle_s == 0:
        model.unload()
    else:
        is_pinned = isinf(idle_s)
        ttl_s = None if is_pinned else idle_s
        model.live(replace(model.residence, is_pinned=is_pinned, ttl_s=ttl_s))


async def known(
    request: Request[Any, Any, Any], context: ServerContext, asked: str | None
) -> ServerContext:
    """Return the context of a model for what needs its texts alone; one that was never loaded is loaded for them."""
    model = context.find(asked)
    if context.models.is_one or model.served.state is not None:
        return context.of(model)
    return await leased(request, context, asked)


async def leased(
    request: Request[Any, Any, Any],
    context: ServerContext,
    asked: str | None,
    streamed: GenerationRequest | None = None,
    *,
    numbered: Sequence[NumberedAdapter] | None = None,
) -> ServerContext:
    """Hold the model that a request asks for until its answer has ended; a client that leaves waits no longer.

    A stream, which ``streamed`` asks for, begins while the model is not ready. Its adapters are as of
    :meth:`machd.http.context.ServerContext.leased`.

    Raises:
        ClientDisconnectedError: The client left.
        MachdError: As of :meth:`machd.http.context.ServerContext.leased`.
    """
    found = context.find_asked(asked)
    model = context.models[found.model_name]
    if model.is_ready:
        return await context.leased(request.scope, asked, numbered=numbered)

    def begin_stream() -> None:
        if streamed is not None:
            name = model.shown_name if found.adapter is None else context.name_of(found.adapter)
            note_cold(ColdRequest(request, context, model, name, streamed))

    leasing = context.leased(request.scope, asked, begin_stream, numbered=numbered)
    return await while_connected(request.receive, leasing)


def _checked(body: _R, vocabulary_tokens: int) -> _R:
    checked = body.checked()
    checked.check_vocabulary(vocabulary_tokens)
    return checked


_HASH_BYTES = 8


def system_fingerprint(
    model: ModelDescription, versions: Versions, adapters: tuple[Adapter, ...] = ()
) -> str:
    """``fp_`` and a hash of the model, its weights' form, its adapters, the versions and the backend."""
    parts = (
        model.model_id,
        model.dtype,
        model.quantization,
        versions.machd,
        versions.mlx,
        versions.mlx_lm,
        model.backend,
        model.blas,
        *((adapter_namespace(adapters),) if adapters else ()),
    )
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=_HASH_BYTES)
    return f"fp_{digest.hexdigest()}"
