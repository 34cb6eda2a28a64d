"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Request
from litestar.di import NamedDependency
from litestar.types import ASGIApp
from msgspec import UNSET, UnsetType

from machd.dialects.completions.answer import Completion, CompletionChoice
from machd.dialects.completions.request import CompletionRequest
from machd.dialects.endpoint import endpoint
from machd.dialects.generation import (
    compiled,
    identify,
    read_generation,
    respond,
    system_fingerprint,
)
from machd.dialects.infill import fill_format, with_fill_ends
from machd.dialects.logprobs import (
    CompletionChoiceLogprobs,
    TextOffsets,
    completion_logprobs,
    joined_columns,
    prompt_columns,
    prompt_logprobs,
    prompt_token_logprobs,
)
from machd.dialects.openai_stream import OpenAIStream
from machd.dialects.prompt_progress import PromptProgress
from machd.dialects.usage import FinishReason, Usage, wire_finish_reason
from machd.engine.protocol.fill_format import FillFormat
from machd.engine.protocol.step import PromptLogprob
from machd.engine.protocol.tokenizer import Tokenizer
from machd.generations.generation import ChoiceDelta, GenerationUsage
from machd.generations.prefill_progress import PrefillProgress
from machd.http.context import ServerContext
from machd.http.sse import DONE, data_frame
from machd.reading.conversation import PreparedConversation
from machd.reading.truncation import max_prompt_tokens
from machd.request.generation import GenerationOptions


@endpoint("POST /v1/completions", Completion, takes=CompletionRequest, streams=Completion)
async def create_completion(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Continue a text."""
    body, context = await read_generation(request, context, CompletionRequest)
    service = context.service
    options = body.options()
    form = None
    if body.suffix:
        form = await service.in_worker(fill_format, context.served.front, param="suffix")
        options = with_fill_ends(options, form)
    prompts = await service.in_worker(
        _tokenise, context.served.tokenizer, body, form, context.served.model.context_tokens
    )
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = await service.in_worker(_echo, context.served.tokenizer, body, prompts)
    guidance = await compiled(request, context, body.constraint())
    identity = identify(request, context, endpoint="completions", prefix="cmpl-")
    dialect = _CompletionDialect(
        options,
        Completion(
            id=identity.generation_id,
            created=identity.created_unix_s,
            model=context.answer_name,
            system_fingerprint=system_fingerprint(
                context.served.model, context.versions, context.chosen
            ),
            choices=[],
        ),
        [
            _GrowingChoice(index, prompt, echo, body, context.served.tokenizer)
            for index, (prompt, echo) in enumerate(
                one for one in zip(prompts, echoes, strict=True) for _ in range(options.n)
            )
        ],
    )
    return respond(
        context,
        identity,
        [PreparedConversation(prompt, guidance) for prompt in prompts],
        options,
        dialect,
        prompt_param="prompt",
        tell_progress=dialect.progress,
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


class _GrowingChoice:
    """One completion, which grows by the choices that a stream's chunks hold."""

    def __init__(
        self,
        index: int,
        prompt: tuple[int, ...],
        echo: str,
        body: CompletionRequest,
        tokenizer: Tokenizer,
    ) -> None:
        """Begin a choice. ``echo`` is empty unless the prompt is repeated; ``body`` holds all prompts and is not kept."""
        self._index = index
        self._prompt = prompt
        self._echo = echo
        self._top_logprobs = body.logprobs
        self._echo_top_logprobs = body.echoed_logprobs
        self._prompt_top_logprobs = body.prompt_logprobs
        self._tokenizer = tokenizer
        # An echo with log-probabilities comes with them, which may not be there yet.
        self.opening_text = "" if body.echoed_logprobs is not None else echo
        self._texts = [self.opening_text]
        self._columns: list[CompletionChoiceLogprobs] = []
        self._text_offsets: TextOffsets | None = None
        if body.logprobs is not None:
            start = len(echo) - len(self.opening_text)
            self._text_offsets = TextOffsets(tokenizer.detokenizer(), start=start)
        self._prompt_logprobs: tuple[PromptLogprob, ...] = ()
        self._finish_reason: FinishReason | None = None

    def push(self, delta: ChoiceDelta) -> CompletionChoice:
        """Append what came; returns what is new."""
        text, columns = delta.text, self._new_columns(delta)
        if (scored := prompt_logprobs(delta)) is not None:
            self._prompt_logprobs = scored
            if self._echo_top_logprobs is not None:
                text = self._echo + text
        self._texts.append(text)
        self._columns += columns
        self._finish_reason = wire_finish_reason(delta.finish_reason)
        return self._choice(text, columns)

    def finish(self) -> CompletionChoice:
        """Return the whole choice."""
        whole = self._choice("".join(self._texts), self._columns)
        if self._prompt_top_logprobs is None:
            return whole
        scored = prompt_token_logprobs(
            self._prompt_logprobs, self._tokenizer, top_logprobs=self._prompt_top_logprobs
        )
        return msgspec.structs.replace(whole, prompt_logprobs=scored)

    def _choice(self, text: str, columns: list[CompletionChoiceLogprobs]) -> CompletionChoice:
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=joined_columns(columns) if columns else None,
            finish_reason=self._finish_reason,
        )

    def _new_columns(self, delta: ChoiceDelta) -> list[CompletionChoiceLogprobs]:
        """Columns of the echoed prompt, if it comes with this delta, and of the delta's tokens."""
        columns: list[CompletionChoiceLogprobs] = []
        if self._text_offsets is None:
            return columns
        if self._echo_top_logprobs is not None and (scored := prompt_logprobs(delta)) is not None:
            echoed = prompt_columns(
                self._prompt,
                scored,
                self._tokenizer,
                text=self._echo,
                top_logprobs=self._echo_top_logprobs,
            )
            columns.append(echoed)
        tokens = delta.tokens
        if delta.stop_token is not None:
            # As OpenAI and vLLM: a row for each token that the usage counts.
            tokens = (*tokens, delta.stop_token)
        if tokens:
            generated = completion_logprobs(
                tokens,
                self._tokenizer,
                text_offsets=self._text_offsets.advance(tokens),
                with_top=bool(self._top_logprobs),
            )
            columns.append(generated)
        return columns


class _CompletionDialect(OpenAIStream):
    def __init__(
        self, options: GenerationOptions, blank: Completion, choices: Sequence[_GrowingChoice]
    ) -> None:
        self._options = options
        self._blank = blank
        self._choices = choices
        self._encoder = msgspec.json.Encoder()

    def opening(self, _usage: GenerationUsage) -> bytes:
        return b"".join(
            self._object([CompletionChoice(index=index, text=echo, finish_reason=None)])
            for index, choice in enumerate(self._choices)
            if (echo := choice.opening_text)
        )

    def progress(self, progress: PrefillProgress) -> bytes:
        nothing = CompletionChoice(index=0, text="", finish_reason=None)
        usage = None if self._options.include_usage else UNSET
        event = msgspec.structs.replace(
            self._completion([nothing], usage), prompt_progress=PromptProgress.of(progress)
        )
        return data_frame(self._encoder.encode(event))

    def push(self, delta: ChoiceDelta) -> bytes:
        return self._object([self._choices[delta.index].push(delta)])

    def closing(self, usage: GenerationUsage) -> bytes:
        last = self._object([], self._usage(usage)) if self._options.include_usage else b""
        return last + DONE

    def finish(self, usage: GenerationUsage) -> bytes:
        choices = [choice.finish() for choice in self._choices]
        return self._encoder.encode(self._completion(choices, self._usage(usage)))

    def _usage(self, usage: GenerationUsage) -> Usage:
        return Usage.of(usage, tells_cache=self._options.includes_cache_diagnosis)

    def _object(self, choices: list[CompletionChoice], usage: Usage | None = None) -> bytes:
        event = self._completion(choices, usage if self._options.include_usage else UNSET)
        return data_frame(self._encoder.encode(event))

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return msgspec.structs.replace(self._blank, choices=choices, usage=usage)
