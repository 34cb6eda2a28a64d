"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request, post
from litestar.di import NamedDependency
from litestar.types import ASGIApp
from msgspec import UNSET

from machd.api.completion import Completion, CompletionChoice
from machd.api.completion_request import CompletionRequest
from machd.api.logprobs import CompletionChoiceLogprobs
from machd.api.options import GenerationOptions
from machd.api.usage import Usage
from machd.engine.protocol import Tokenizer
from machd.errors import InvalidRequestError, MachdError
from machd.http.context import ServerContext
from machd.http.failures import error_json
from machd.http.fingerprint import system_fingerprint
from machd.http.generations import identify, read_generation, respond
from machd.http.logprobs import TextOffsets, completion_logprobs
from machd.http.sse import COMMENT_KEEP_ALIVE, DONE, data_frame
from machd.http.usage import wire_finish_reason, wire_usage
from machd.serving.generation import ChoiceDelta, GenerationUsage
from machd.serving.guidance import NO_GUIDANCE, Guidance

__all__ = ["create_completion"]


@post("/v1/completions", status_code=200)
async def create_completion(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Continue a text."""
    body = await read_generation(request, context, CompletionRequest)
    service = context.service
    options = body.options()
    prompts = await service.in_worker(_tokenise, service.tokenizer, body)
    echoes = await service.in_worker(_echo, service.tokenizer, body) if body.echo else []
    guidance = NO_GUIDANCE
    if (constraint := body.constraint()) is not None:
        guidance = Guidance(grammar=await service.compile(constraint))
    identity = identify(request, context, endpoint="completions", prefix="cmpl-")
    return respond(
        context,
        identity,
        prompts,
        options,
        _CompletionDialect(
            options,
            Completion(
                id=identity.generation_id,
                created=identity.created_unix_s,
                model=service.model.model_id,
                system_fingerprint=system_fingerprint(service.model, context.versions),
                choices=[],
            ),
            service.tokenizer,
            echoes,
        ),
        prompt_param="prompt",
        guidance=guidance,
    )


def _tokenise(tokenizer: Tokenizer, body: CompletionRequest) -> list[tuple[int, ...]]:
    tokenised = [
        tuple(tokenizer.encode(prompt, add_special_tokens=True))
        if isinstance(prompt, str)
        else prompt
        for prompt in body.prompts()
    ]
    if not all(tokenised):
        raise InvalidRequestError("prompt: holds no token; send some text", param="prompt")
    return tokenised


def _echo(tokenizer: Tokenizer, body: CompletionRequest) -> list[str]:
    return [
        prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in body.prompts()
    ]


class _CompletionDialect:
    """Text completion objects."""

    def __init__(
        self,
        options: GenerationOptions,
        blank: Completion,
        tokenizer: Tokenizer,
        echoes: Sequence[str],
    ) -> None:
        self._options = options
        self._blank = blank
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._text_offsets: dict[int, TextOffsets] = {}
        self._encoder = msgspec.json.Encoder()

    keep_alive = COMMENT_KEEP_ALIVE

    def opening(self, _usage: GenerationUsage) -> bytes:
        return b"".join(
            self._object([CompletionChoice(index=index, text=echo, finish_reason=None)])
            for index in range(len(self._echoes) * self._options.n)
            if (echo := self._echo(index))
        )

    def event(self, delta: ChoiceDelta) -> bytes:
        return self._object([self._choice(delta, delta.text)])

    def closing(self, usage: GenerationUsage) -> bytes:
        last = self._object([], wire_usage(usage)) if self._options.include_usage else b""
        return last + DONE

    def failure(self, error: MachdError) -> bytes:
        return data_frame(error_json(error)) + DONE

    def whole(self, deltas: Sequence[ChoiceDelta], usage: GenerationUsage) -> bytes:
        choices = [self._choice(delta, self._echo(delta.index) + delta.text) for delta in deltas]
        return self._encoder.encode(self._completion(choices, wire_usage(usage)))

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._options.n] if self._echoes else ""

    def _choice(self, delta: ChoiceDelta, text: str) -> CompletionChoice:
        return CompletionChoice(
            index=delta.index,
            text=text,
            logprobs=self._logprobs(delta),
            finish_reason=wire_finish_reason(delta.finish_reason),
        )

    def _logprobs(self, delta: ChoiceDelta) -> CompletionChoiceLogprobs | None:
        if not self._options.logprobs:
            return None
        if delta.index not in self._text_offsets:
            self._text_offsets[delta.index] = TextOffsets(self._tokenizer.detokenizer())
        return completion_logprobs(
            delta.tokens,
            self._tokenizer,
            text_offsets=self._text_offsets[delta.index].advance(delta.tokens),
            with_top=bool(self._options.top_logprobs),
        )

    def _object(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        event = self._completion(choices, usage if self._options.include_usage else UNSET)
        return data_frame(self._encoder.encode(event))

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return msgspec.structs.replace(self._blank, choices=choices, usage=usage)
