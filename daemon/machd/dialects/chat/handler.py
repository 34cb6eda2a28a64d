"""``/v1/chat/completions``: create one, look at a stored one, forget it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.types import ASGIApp
from msgspec import UNSET, UnsetType

from machd.dialects.chat.answer import (
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    DeletedChatCompletion,
    GrowingChoice,
)
from machd.dialects.chat.request import ChatCompletionRequest
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import converse, identify, read_conversation, system_fingerprint
from machd.dialects.logprobs import PromptTokenLogprobs, prompt_logprobs, prompt_token_logprobs
from machd.dialects.openai_stream import OpenAIStream
from machd.dialects.prompt_progress import PromptProgress
from machd.dialects.usage import Usage
from machd.engine.protocol.step import PromptLogprob
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import NotFoundError
from machd.generations.generation import ChoiceDelta, GenerationIdentity, GenerationUsage
from machd.generations.prefill_progress import PrefillProgress
from machd.generations.response_store import ResponseStore, StoredResponse, Turn
from machd.http.authentication import client_name
from machd.http.context import ServerContext
from machd.http.sse import DONE, data_frame
from machd.http.stream import Dialect
from machd.request.generation import GenerationOptions


@endpoint(
    "POST /v1/chat/completions",
    ChatCompletion,
    takes=ChatCompletionRequest,
    streams=ChatCompletionChunk,
)
async def create_chat_completion(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Continue a conversation."""
    body, conversation, context = await read_conversation(
        request, context, ChatCompletionRequest, ChatCompletionRequest.conversation
    )
    options = body.options()
    identity = identify(request, context, endpoint="chat_completions", prefix="chatcmpl-")
    blank = ChatCompletionChunk(
        id=identity.generation_id,
        created=identity.created_unix_s,
        model=context.answer_name,
        service_tier=body.used_tier,
        system_fingerprint=system_fingerprint(
            context.served.model, context.versions, context.chosen
        ),
        choices=[],
    )
    writer = _ChatDialect(body, options, blank, context.served.tokenizer)
    dialect: Dialect = writer
    if body.store:
        dialect = KeepingDialect(dialect, keep_in(context.responses, identity))
    preparing = context.service.prepare(
        conversation, client=identity.client, salt=options.cache_salt
    )
    return await converse(
        request, context, identity, preparing, options, dialect, tell_progress=writer.progress
    )


class _ChatDialect(OpenAIStream):
    def __init__(
        self,
        body: ChatCompletionRequest,
        options: GenerationOptions,
        blank: ChatCompletionChunk,
        tokenizer: Tokenizer,
    ) -> None:
        self._metadata = body.metadata or UNSET
        self._options = options
        self._blank = blank
        self._tokenizer = tokenizer
        self._encoder = msgspec.json.Encoder()
        logprobs_from = None if options.sampling.top_logprobs is None else tokenizer
        self._choices = [
            GrowingChoice(index, is_legacy=body.is_legacy, logprobs_from=logprobs_from)
            for index in range(options.n)
        ]
        self._prompt_logprobs: tuple[PromptLogprob, ...] = ()

    def opening(self, _usage: GenerationUsage) -> bytes:
        return b"".join(
            self._chunk(
                [ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))]
            )
            for index in range(self._options.n)
        )

    def progress(self, progress: PrefillProgress) -> bytes:
        # llama.cpp repeats the role, which OpenAI's own helpers join to "assistantassistant".
        chunk = msgspec.structs.replace(
            self._blank,
            choices=[ChatChunkChoice(index=0, delta=ChatDelta())],
            usage=None if self._options.include_usage else UNSET,
            prompt_progress=PromptProgress.of(progress),
        )
        return data_frame(self._encoder.encode(chunk))

    def push(self, delta: ChoiceDelta) -> bytes:
        if delta.index == 0 and (scored := prompt_logprobs(delta)) is not None:
            self._prompt_logprobs = scored
        return b"".join(self._chunk([one]) for one in self._choices[delta.index].push(delta))

    def closing(self, usage: GenerationUsage) -> bytes:
        last = self._chunk([], self._usage(usage)) if self._options.include_usage else b""
        return last + DONE

    def finish(self, usage: GenerationUsage) -> bytes:
        return self._encoder.encode(
            ChatCompletion(
                id=self._blank.id,
                created=self._blank.created,
                model=self._blank.model,
                choices=[choice.finish() for choice in self._choices],
                usage=self._usage(usage),
                service_tier=self._blank.service_tier,
                metadata=self._metadata,
                system_fingerprint=self._blank.system_fingerprint,
                prompt_logprobs=self._wire_prompt_logprobs(),
            )
        )

    def _usage(self, usage: GenerationUsage) -> Usage:
        return Usage.of(usage, tells_cache=self._options.includes_cache_diagnosis)

    def _wire_prompt_logprobs(self) -> PromptTokenLogprobs | UnsetType:
        """Return the prompt's log-probabilities, which all choices share."""
        asked = self._options.sampling.prompt_logprobs
        if asked is None:
            return UNSET
        return prompt_token_logprobs(self._prompt_logprobs, self._tokenizer, top_logprobs=asked)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        chunk = msgspec.structs.replace(
            self._blank, choices=choices, usage=usage if self._options.include_usage else UNSET
        )
        return data_frame(self._encoder.encode(chunk))


_KEY_PREFIX = "chat.completion/"
"""Keeps the ids apart from those of ``/v1/responses``, which hold no slash."""

_NOT_STORED = (
    "no such chat completion is stored here; it may have been made without store: true, with another "
    "API key or before a restart, or dropped for want of room (limits.max_stored_responses, "
    "limits.max_stored_response_bytes)"
)


@endpoint("GET /v1/chat/completions/{id}", ChatCompletion, also=(404,), id_as="completion_id:str")
async def get_chat_completion(
    request: Request[Any, Any, Any],
    context: NamedDependency[ServerContext],
    completion_id: FromPath[str],
) -> Response[bytes]:
    """A chat completion that was made with store: true."""
    context.service.lifecycle.check_accepting()
    found = context.responses.get(client_name(request.scope), _KEY_PREFIX + completion_id)
    if found is None:
        raise NotFoundError(_NOT_STORED, param="completion_id")
    return Response(found.answer, media_type="application/json")


@endpoint(
    "DELETE /v1/chat/completions/{id}",
    DeletedChatCompletion,
    also=(404,),
    id_as="completion_id:str",
)
async def delete_chat_completion(
    request: Request[Any, Any, Any],
    context: NamedDependency[ServerContext],
    completion_id: FromPath[str],
) -> DeletedChatCompletion:
    """Forget a stored chat completion."""
    context.service.lifecycle.check_accepting()
    if not context.responses.delete(client_name(request.scope), _KEY_PREFIX + completion_id):
        raise NotFoundError(_NOT_STORED, param="completion_id")
    return DeletedChatCompletion(id=completion_id)


def keep_in(store: ResponseStore, identity: GenerationIdentity) -> Callable[[bytes], None]:
    """A function that stores the whole answer of a generation."""

    def keep(answer: bytes) -> None:
        key = _KEY_PREFIX + identity.generation_id
        store.put(identity.client, key, StoredResponse(answer, Turn(()), ()))

    return keep


class KeepingDialect:
    """A dialect whose whole answer is also kept, streamed or not; one that fails is not."""

    def __init__(self, dialect: Dialect, keep: Callable[[bytes], None]) -> None:
        self._dialect = dialect
        self._keep = keep
        self.keep_alive = dialect.keep_alive
        self.media_type = dialect.media_type
        self.opening = dialect.opening
        self.push = dialect.push
        self.failure = dialect.failure

    def closing(self, usage: GenerationUsage) -> bytes:
        """Events that end the stream, whose whole answer is kept now."""
        self.finish(usage)
        return self._dialect.closing(usage)

    def finish(self, usage: GenerationUsage) -> bytes:
        """The whole answer, which is kept."""
        answer = self._dialect.finish(usage)
        self._keep(answer)
        return answer
