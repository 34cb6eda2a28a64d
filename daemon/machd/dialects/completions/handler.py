"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from litestar import Request
from litestar.di import NamedDependency
from litestar.types import ASGIApp
from msgspec import UNSET, UnsetType

from machd.dialects.completions.answer import Completion, CompletionChoice
from machd.dialects.completions.request import CompletionRequest
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import identify, read_generation, respond, system_fingerprint
from machd.dialects.infill import fill_format, with_fill_ends
from machd.dialects.logprobs import (
    CompletionChoiceLogprobs,
    PromptTokenLogprobs,
    TextOffsets,
    completion_logprobs,
    joined_columns,
    prompt_columns,
    prompt_token_logprobs,
)
from machd.dialects.usage import Usage, wire_finish_reason
from machd.dialects.wire.errors import error_json
from machd.engine.protocol.fill_format import FillFormat
from machd.engine.protocol.tokenizer import Tokenizer
from machd.errors import MachdError
from machd.generations.generation import ChoiceDelta, GenerationUsage
from machd.http.authentication import client_name
from machd.http.context import ServerContext
from machd.http.sse import COMMENT_KEEP_ALIVE, DONE, EVENT_STREAM, data_frame
from machd.http.stream import while_connected
from machd.reading.guidance import NO_GUIDANCE, Guidance
from machd.reading.truncation import max_prompt_tokens


@endpoint("POST /v1/completions", Completion, takes=CompletionRequest, streams=Completion)
async def create_completion(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Continue a text."""
    body = await read_generation(request, context, CompletionRequest)
    service = context.service
    options = body.options()
    form = None
    if body.suffix:
        form = await service.in_worker(fill_format, context.served.front, param="suffix")
        options = with_fill_ends(options, form)
    prompts = await service.in_worker(
        _tokenise, context.served.tokenizer, body, form, context.served.model.context_tokens
    )
    echoes = (
        await service.in_worker(_echo, context.served.tokenizer, body, prompts) if body.echo else []
    )
    guidance = NO_GUIDANCE
    if (constraint := body.constraint()) is not None:
        guidance = Guidance(
            grammar=await while_connected(
                request.receive, service.compile(constraint, client=client_name(request.scope))
            )
        )
    identity = identify(request, context, endpoint="completions", prefix="cmpl-")
    return respond(
        context,
        identity,
        prompts,
        options,
        _CompletionDialect(
            body,
            Completion(
                id=identity.generation_id,
                created=identity.created_unix_s,
                model=context.served.model.model_id,
                system_fingerprint=system_fingerprint(context.served.model, context.versions),
                choices=[],
            ),
            context.served.tokenizer,
            _Prompts(prompts, echoes, options.n),
        ),
        prompt_param="prompt",
        guidance=guidance,
    )


def _tokenise(
    tokenizer: Tokenizer, body: CompletionRequest, form: FillFormat | None, context_tokens: int
) -> list[tuple[int, ...]]:
    if form is not None:
        return [form.prompt(prompt, body.suffix or "") for prompt in body.texts()]
    tokenised = [
        tuple(tokenizer.encode(prompt, add_special_tokens=True))
        if isinstance(prompt, str)
        else prompt
        for prompt in body.prompts()
    ]
    if (asked := body.truncate_prompt_tokens) is not None:
        kept_tokens = max_prompt_tokens(asked, context_tokens)
        return [prompt[-kept_tokens:] for prompt in tokenised]
    return tokenised


def _echo(
    tokenizer: Tokenizer, body: CompletionRequest, prompts: Sequence[tuple[int, ...]]
) -> list[str]:
    """The prompts as text, as they were sent unless their beginnings were cut off."""
    sent = prompts if body.truncate_prompt_tokens is not None else body.prompts()
    return [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in sent]


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompts of a request, found by the index of a choice.

    Attributes:
        token_ids: Of each prompt.
        echoes: The prompts as text; empty unless they are repeated in the answer.
        choices_per_prompt: Choices that each prompt has.
    """

    token_ids: Sequence[tuple[int, ...]]
    echoes: Sequence[str]
    choices_per_prompt: int

    def of_choice(self, index: int) -> tuple[int, ...]:
        """The tokens of a choice's prompt."""
        return self.token_ids[index // self.choices_per_prompt]

    def echo_of_choice(self, index: int) -> str:
        """The text that a choice begins with; empty where prompts are not repeated."""
        return self.echoes[index // self.choices_per_prompt] if self.echoes else ""


class _CompletionDialect:
    """Text completion objects."""

    def __init__(
        self,
        body: CompletionRequest,
        blank: Completion,
        tokenizer: Tokenizer,
        prompts: _Prompts,
    ) -> None:
        self._options = body.options()
        self._prompt_top_logprobs = body.prompt_logprobs
        self._echo_top_logprobs = body.echoed_logprobs
        self._blank = blank
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._text_offsets: dict[int, TextOffsets] = {}
        self._encoder = msgspec.json.Encoder()

    media_type = EVENT_STREAM
    keep_alive = COMMENT_KEEP_ALIVE

    def opening(self, _usage: GenerationUsage) -> bytes:
        if self._echo_top_logprobs is not None:
            return b""  # echoes come with their log-probabilities, which may not be there yet
        choices = len(self._prompts.echoes) * self._prompts.choices_per_prompt
        return b"".join(
            self._object([CompletionChoice(index=index, text=echo, finish_reason=None)])
            for index in range(choices)
            if (echo := self._prompts.echo_of_choice(index))
        )

    def event(self, delta: ChoiceDelta) -> bytes:
        has_echo = self._echo_top_logprobs is not None and delta.prompt_logprobs is not None
        echo = self._prompts.echo_of_choice(delta.index) if has_echo else ""
        return self._object([self._choice(delta, echo + delta.text)])

    def closing(self, usage: GenerationUsage) -> bytes:
        last = self._object([], Usage.of(usage)) if self._options.include_usage else b""
        return last + DONE

    def failure(self, error: MachdError) -> bytes:
        return data_frame(error_json(error)) + DONE

    def whole(self, deltas: Sequence[ChoiceDelta], usage: GenerationUsage) -> bytes:
        choices = [
            self._choice(delta, self._prompts.echo_of_choice(delta.index) + delta.text)
            for delta in deltas
        ]
        return self._encoder.encode(self._completion(choices, Usage.of(usage)))

    def _choice(self, delta: ChoiceDelta, text: str) -> CompletionChoice:
        return CompletionChoice(
            index=delta.index,
            text=text,
            logprobs=self._logprobs(delta),
            finish_reason=wire_finish_reason(delta.finish_reason),
            prompt_logprobs=self._prompt_logprobs(delta),
        )

    def _prompt_logprobs(self, delta: ChoiceDelta) -> PromptTokenLogprobs | UnsetType:
        if self._prompt_top_logprobs is None:
            return UNSET
        return prompt_token_logprobs(
            delta.prompt_logprobs or (),
            self._tokenizer,
            top_logprobs=self._prompt_top_logprobs,
        )

    def _logprobs(self, delta: ChoiceDelta) -> CompletionChoiceLogprobs | None:
        if self._options.sampling.top_logprobs is None:
            return None
        has_echo = self._echo_top_logprobs is not None
        is_echoed = has_echo and delta.prompt_logprobs is not None
        tokens = delta.tokens
        if delta.stop_token is not None:
            # As OpenAI and vLLM: a row for each token that the usage counts.
            tokens = (*tokens, delta.stop_token)
        if not tokens and not is_echoed:
            return None
        echo = self._prompts.echo_of_choice(delta.index) if has_echo else ""
        if delta.index not in self._text_offsets:
            detokenizer = self._tokenizer.detokenizer()
            self._text_offsets[delta.index] = TextOffsets(detokenizer, start=len(echo))
        columns = completion_logprobs(
            tokens,
            self._tokenizer,
            text_offsets=self._text_offsets[delta.index].advance(tokens),
            with_top=bool(self._options.sampling.top_logprobs),
        )
        if self._echo_top_logprobs is None or delta.prompt_logprobs is None:
            return columns
        echoed = prompt_columns(
            self._prompts.of_choice(delta.index),
            delta.prompt_logprobs,
            self._tokenizer,
            text=echo,
            top_logprobs=self._echo_top_logprobs,
        )
        return joined_columns(echoed, columns)

    def _object(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        event = self._completion(choices, usage if self._options.include_usage else UNSET)
        return data_frame(self._encoder.encode(event))

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return msgspec.structs.replace(self._blank, choices=choices, usage=usage)
