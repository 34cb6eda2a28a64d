"""Parts that generating endpoints share: reading a request, identity, fingerprint, opening the answer."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from litestar import Request

from machd.capabilities.versions import Versions
from machd.dialects.bodies import read_public_body
from machd.dialects.wire.bounds import MAX_PROMPT_LOGPROBS
from machd.dialects.wire.generation_request import GenerationRequest
from machd.engine.protocol.engine import ModelDescription
from machd.engine.protocol.media import MediaSpan
from machd.errors import InvalidRequestError
from machd.generations.generation import GenerationIdentity
from machd.generations.trace_context import new_trace
from machd.http.authentication import client_name
from machd.http.context import ServerContext
from machd.http.stamps import arrived_s, request_id, trace_context
from machd.http.stream import Dialect, GenerationResponse, StreamPolicy, while_connected
from machd.reading.conversation import PreparedConversation
from machd.reading.guidance import NO_GUIDANCE, Guidance
from machd.request.conversation import Conversation
from machd.request.generation import GenerationOptions

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
    request: Request[Any, Any, Any], context: ServerContext, *, endpoint: str, prefix: str
) -> GenerationIdentity:
    """Name a request's generation; ``prefix`` is what its id begins with, such as ``chatcmpl-``."""
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
        model=context.served.model.model_id,
        trace=trace,
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
) -> GenerationResponse:
    """Answer a conversation once it is prepared; a client that leaves before ends that.

    Args:
        request: Whose client may leave.
        context: What is served.
        identity: Whose generation it is.
        preparing: Makes a prompt of the conversation.
        options: How to generate.
        dialect: Writes the answer.
        prompt_param: The request field that the prompt came from, for errors about it.
        dropped_tools: Types of tools that the model is not shown, for the header that says so.

    Raises:
        ClientDisconnectedError: The client left.
        MachdError: As of :meth:`machd.generations.service.GenerationService.prepare` and :func:`respond`.
    """
    prepared = await while_connected(request.receive, preparing)
    return respond(
        context,
        identity,
        [prepared.prompt],
        options,
        dialect,
        prompt_param=prompt_param,
        guidance=prepared.guidance,
        dropped_messages=prepared.dropped_messages,
        dropped_tools=dropped_tools,
        omitted_media=prepared.omitted_media,
        media=prepared.media,
    )


def respond(  # noqa: PLR0913 - one argument for each part of an answer
    context: ServerContext,
    identity: GenerationIdentity,
    prompts: Sequence[tuple[int, ...]],
    options: GenerationOptions,
    dialect: Dialect,
    *,
    prompt_param: str,
    guidance: Guidance = NO_GUIDANCE,
    dropped_messages: int = 0,
    dropped_tools: Sequence[str] = (),
    omitted_media: int = 0,
    media: tuple[MediaSpan, ...] = (),
) -> GenerationResponse:
    """Open the generation and hand it to the response that will own it.

    Nothing is awaited in between, so a client that leaves cannot leave a generation behind.

    Args:
        context: What is served.
        identity: Whose generation it is.
        prompts: Token ids.
        options: How to generate.
        dialect: Writes the answer.
        prompt_param: The request field that the prompts came from, for errors about them.
        guidance: What shapes the completions, and how they are read.
        dropped_messages: Messages that were left out of the prompt, for the header that says so.
        dropped_tools: Types of tools that the model is not shown, for another header.
        omitted_media: Images and videos that it is not shown, for a third.
        media: Images and videos of the one prompt that has any.

    Raises:
        InvalidRequestError: The request asks for more than limits, context or bounds allow.
        UnavailableError: No new work is taken.
    """
    _check_prompt_logprobs(prompts, options)
    options = with_model_defaults(context, options)
    settings = context.settings
    return GenerationResponse(
        context.service.open(
            prompts,
            options,
            identity,
            prompt_param=prompt_param,
            guidance=guidance,
            media=media,
        ),
        dialect,
        StreamPolicy(
            interval_tokens=options.stream_interval or settings.streaming.interval,
            keepalive_s=settings.streaming.keepalive_s,
        ),
        is_stream=options.stream,
        notes=_notes(guidance, dropped_messages, dropped_tools, omitted_media),
    )


def with_model_defaults(context: ServerContext, options: GenerationOptions) -> GenerationOptions:
    """Return the options with the checkpoint's own defaults for what the request leaves unsaid."""
    return options.with_defaults(context.served.model.default_sampling.named)


def _notes(
    guidance: Guidance, dropped_messages: int, dropped_tools: Sequence[str], omitted_media: int
) -> list[tuple[bytes, bytes]]:
    """Headers that say what of the request was left out."""
    notes = []
    if dropped_tools:
        notes.append((b"x-dropped-tools", ", ".join(dropped_tools).encode()))
    if omitted_media:
        notes.append((b"x-omitted-images", str(omitted_media).encode()))
    if guidance.grammar is not None and guidance.grammar.ignored_keywords:
        keywords = ", ".join(guidance.grammar.ignored_keywords)
        notes.append((b"x-ignored-schema-keywords", keywords.encode()))
    if dropped_messages:
        notes.append((b"x-dropped-messages", str(dropped_messages).encode()))
    return notes


def _check_prompt_logprobs(prompts: Sequence[tuple[int, ...]], options: GenerationOptions) -> None:
    """Bound what the answer says of prompts, which the body's length bounds too loosely.

    Raises:
        InvalidRequestError: It would be more than ``MAX_PROMPT_LOGPROBS``.
    """
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
    body = await read_public_body(request, context, type_, takes_media=type_.takes_media)
    service = context.service
    service.lifecycle.check_accepting()
    context.find(body.model)
    if type_.uses_tokens:
        # Before any work is done for it; counting uses no tokens.
        service.check_client(client_name(request.scope))
    context = await leased(request, context, body.model)
    checked = await service.in_worker(check, body, context.served.model.vocabulary_tokens)
    return checked, context


async def known(
    request: Request[Any, Any, Any], context: ServerContext, asked: str | None
) -> ServerContext:
    """Return the context of a model for what needs its texts alone; one that was never loaded is loaded for them."""
    model = context.find(asked)
    if context.models.is_one or model.served.state is not None:
        return context.of(model)
    return await leased(request, context, asked)


async def leased(
    request: Request[Any, Any, Any], context: ServerContext, asked: str | None
) -> ServerContext:
    """Hold the model that a request asks for until its answer has ended; a client that leaves waits no longer.

    Raises:
        ClientDisconnectedError: The client left.
        MachdError: As of :meth:`machd.http.context.ServerContext.leased`.
    """
    if context.find(asked).is_ready:
        return await context.leased(request.scope, asked)
    return await while_connected(request.receive, context.leased(request.scope, asked))


def _checked(body: _R, vocabulary_tokens: int) -> _R:
    checked = body.checked()
    checked.check_vocabulary(vocabulary_tokens)
    return checked


_HASH_BYTES = 8


def system_fingerprint(model: ModelDescription, versions: Versions) -> str:
    """``fp_`` and a hash of the model, its weights' form, the versions and the backend."""
    parts = (
        model.model_id,
        model.dtype,
        model.quantization,
        versions.machd,
        versions.mlx,
        versions.mlx_lm,
        model.backend,
        model.blas,
    )
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=_HASH_BYTES)
    return f"fp_{digest.hexdigest()}"
