"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, post
from litestar.di import NamedDependency
from litestar.types import ASGIApp
from msgspec import UNSET

from machd.api.chat_completion import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatResponseMessage,
)
from machd.api.chat_request import ChatCompletionRequest
from machd.api.conversation import Conversation
from machd.api.logprobs import ChatLogprobs
from machd.api.options import GenerationOptions
from machd.api.usage import Usage
from machd.engine.protocol import Tokenizer
from machd.errors import MachdError
from machd.http.context import ServerContext
from machd.http.failures import error_json
from machd.http.generations import identify, read_generation, respond
from machd.http.logprobs import chat_logprobs
from machd.http.sse import COMMENT_KEEP_ALIVE, DONE, data_frame
from machd.http.usage import wire_finish_reason, wire_usage
from machd.serving.conversation import prepare_conversation
from machd.serving.generation import ChoiceDelta, GenerationIdentity, GenerationUsage

__all__ = ["create_chat_completion"]


@post("/v1/chat/completions", status_code=200)
async def create_chat_completion(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Continue a conversation."""
    body = await read_generation(request, context, ChatCompletionRequest)
    service = context.service
    options = body.options()
    prepared = await service.in_worker(
        prepare_conversation, Conversation(body.template_messages()), service.engine
    )
    identity = identify(request, context, endpoint="chat_completions", prefix="chatcmpl")
    return respond(
        context,
        identity,
        [prepared.prompt],
        options,
        _ChatDialect(identity, options, service.model.model_id, service.tokenizer),
        prompt_param="messages",
        guidance=prepared.guidance,
    )


class _ChatDialect:
    """Chat completion objects."""

    def __init__(
        self,
        identity: GenerationIdentity,
        options: GenerationOptions,
        model_id: str,
        tokenizer: Tokenizer,
    ) -> None:
        self._identity = identity
        self._options = options
        self._model_id = model_id
        self._tokenizer = tokenizer
        self._encoder = msgspec.json.Encoder()

    keep_alive = COMMENT_KEEP_ALIVE

    def opening(self) -> bytes:
        return b"".join(
            self._chunk(
                [ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))]
            )
            for index in range(self._options.n)
        )

    def event(self, delta: ChoiceDelta) -> bytes:
        choice = ChatChunkChoice(
            index=delta.index,
            delta=ChatDelta(content=delta.text) if delta.text else ChatDelta(),
            logprobs=self._logprobs(delta),
            finish_reason=wire_finish_reason(delta.finish_reason),
        )
        return self._chunk([choice])

    def closing(self, usage: GenerationUsage) -> bytes:
        last = self._chunk([], wire_usage(usage)) if self._options.include_usage else b""
        return last + DONE

    def failure(self, error: MachdError) -> bytes:
        return data_frame(error_json(error)) + DONE

    def whole(self, deltas: Sequence[ChoiceDelta], usage: GenerationUsage) -> bytes:
        choices = [
            ChatChoice(
                index=delta.index,
                message=ChatResponseMessage(content=delta.text),
                logprobs=self._logprobs(delta),
                finish_reason=wire_finish_reason(delta.finish_reason) or "stop",
            )
            for delta in deltas
        ]
        return self._encoder.encode(
            ChatCompletion(
                id=self._identity.generation_id,
                created=self._identity.created_unix_s,
                model=self._model_id,
                choices=choices,
                usage=wire_usage(usage),
            )
        )

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        return chat_logprobs(delta.tokens, self._tokenizer) if self._options.logprobs else None

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> bytes:
        chunk = ChatCompletionChunk(
            id=self._identity.generation_id,
            created=self._identity.created_unix_s,
            model=self._model_id,
            choices=choices,
            usage=usage if self._options.include_usage else UNSET,
        )
        return data_frame(self._encoder.encode(chunk))
