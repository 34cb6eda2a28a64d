"""``POST /infill``: llama.cpp's endpoint for the text between a prefix and a suffix."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec
from litestar import Request
from litestar.di import NamedDependency
from litestar.types import ASGIApp
from msgspec import UNSET, Meta, Struct, UnsetType

from machd.dialects.endpoint import endpoint
from machd.dialects.generation import compiled, identify, read_generation, respond
from machd.dialects.prompt_progress import PromptProgress
from machd.dialects.wire.bounds import ContentText
from machd.dialects.wire.errors import error_json
from machd.dialects.wire.generation_request import agreed_tokens
from machd.dialects.wire.refusal import Ignored, refuse_unsupported
from machd.dialects.wire.sampling import SamplingRequest
from machd.engine.protocol.engine import ModelFront
from machd.engine.protocol.fill_format import ContextFile, FillFormat
from machd.errors import InvalidRequestError, MachdError, UnsupportedParameterError
from machd.generations.generation import ChoiceDelta, GenerationUsage
from machd.generations.prefill_progress import PrefillProgress
from machd.http.context import ServerContext
from machd.http.sse import COMMENT_KEEP_ALIVE, EVENT_STREAM, data_frame
from machd.reading.conversation import PreparedConversation
from machd.request.generation import GenerationOptions

_MAX_FILES = 1024
_FileName = Annotated[str, Meta(max_length=4096)]


class InfillFile(Struct, frozen=True, kw_only=True):
    """A file, or a part of one, that the model reads before the prefix."""

    text: ContentText
    filename: _FileName = "tmp"


class InfillRequest(SamplingRequest, frozen=True, kw_only=True):
    """Texts between which something is to be written, and how to generate it.

    The fields after ``prompt`` steer llama.cpp's own slots, samplers and clock, or pick fields of its
    answer. Editors send them with every request; the answer is a fill of the same gap without them.

    Attributes:
        prompt: What is already written in the gap; the fill continues it.
        input_extra: What the model reads before the prefix.
    """

    input_prefix: ContentText
    input_suffix: ContentText
    input_extra: Annotated[list[InfillFile], Meta(max_length=_MAX_FILES)] | None = None
    prompt: ContentText | None = None
    samplers: Ignored = UNSET
    n_indent: Ignored = UNSET
    t_max_prompt_ms: Ignored = UNSET
    t_max_predict_ms: Ignored = UNSET
    response_fields: Ignored = UNSET

    def checked(self) -> Self:
        """Check as the base class does."""
        refuse_unsupported(self)
        self.constraint()
        self.check_sampling()
        if self.n not in (None, 1):
            raise UnsupportedParameterError(
                "n is not supported here unless it is 1; leave it out", param="n"
            )
        if self.truncate_prompt_tokens is not None:
            raise UnsupportedParameterError(
                "truncate_prompt_tokens is not supported here; leave it out",
                param="truncate_prompt_tokens",
            )
        return self

    def asked_tokens(self) -> int | None:
        """Completion tokens that are asked for; 0 reads the texts into the prefix cache."""
        return agreed_tokens(self.token_fields(), least=0)

    def options(self) -> GenerationOptions:
        """Return the options of the generation, free of this dialect."""
        return self.generation_options(top_logprobs=None)


StopType: TypeAlias = Literal["eos", "limit", "word"]
"""Why a fill ended: by itself, for want of tokens, or with a stop text."""


class InfillAnswer(Struct, frozen=True, kw_only=True):
    """A fill, or one event of a stream. What follows ``tokens_evaluated`` comes once it has ended.

    Attributes:
        content: The fill; of an event, what is new of it, which is nothing in the last one.
        stop: Whether the fill has ended.
        tokens_predicted: Tokens of the fill, up to here.
        tokens_evaluated: Tokens of the prompt.
        tokens_cached: Those of the prompt that were there before the request came.
        truncated: Whether the prompt was cut, which machd never does.
        stopping_word: The stop text that ended the fill; empty without one.
        prompt_progress: With ``return_progress``, in events of a stream that add no text.
    """

    index: Literal[0] = 0
    content: str
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: Literal[False] | UnsetType = UNSET
    stop_type: StopType | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


@endpoint(
    "POST /infill",
    InfillAnswer,
    takes=InfillRequest,
    streams=InfillAnswer,
    cold=lambda _: _InfillStream(),
)
async def create_infill(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Write what stands between a prefix and a suffix, in llama.cpp's words."""
    body, context = await read_generation(request, context, InfillRequest)
    service = context.service
    form = await service.in_worker(fill_format, context.served.front, param="input_suffix")
    prompt = await service.in_worker(_prompt, form, body)
    guidance = await compiled(request, context, body.constraint())
    dialect = _InfillDialect(context.answer_name)
    return respond(
        context,
        identify(request, context, endpoint="infill", prefix="infill-"),
        [PreparedConversation(prompt, guidance)],
        with_fill_ends(body.options(), form),
        dialect,
        prompt_param="input_prefix",
        tell_progress=dialect.progress,
    )


def fill_format(front: ModelFront, *, param: str) -> FillFormat:
    """Return the model's format for the text in the middle; slow the first time.

    Raises:
        InvalidRequestError: The model has no tokens for it.
    """
    form = front.tokenizer.fill_format
    if form is None or not form.fits(front.model.vocabulary_tokens):
        raise InvalidRequestError.at(
            param,
            "the model has no fill-in-the-middle tokens, so it can only continue a text; "
            "ask a model that was trained to fill",
        )
    return form


def with_fill_ends(options: GenerationOptions, form: FillFormat) -> GenerationOptions:
    """The same options for a completion that the model's fill-in-the-middle tokens end as well."""
    if options.ignore_eos:
        return options
    ends = {*options.stop_token_ids, *form.end_token_ids}
    return replace(options, stop_token_ids=tuple(sorted(ends)))


def _prompt(form: FillFormat, body: InfillRequest) -> tuple[int, ...]:
    context = [ContextFile(one.filename, one.text) for one in body.input_extra or ()]
    return form.prompt(body.input_prefix + (body.prompt or ""), body.input_suffix, context)


class _InfillStream:
    """llama.cpp's events: no ``[DONE]``."""

    media_type = EVENT_STREAM
    keep_alive = COMMENT_KEEP_ALIVE

    def failure(self, error: MachdError) -> bytes:
        """An error in place of a piece."""
        return data_frame(error_json(error))


class _InfillDialect(_InfillStream):
    """llama.cpp's objects: pieces of content, and at the end what came of it."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id
        self._encoder = msgspec.json.Encoder()
        self._texts: list[str] = []
        self._predicted_tokens = 0
        self._prompt_tokens = 0
        self._ending: ChoiceDelta | None = None

    def opening(self, usage: GenerationUsage) -> bytes:
        self._prompt_tokens = usage.prompt_tokens
        return b""

    def progress(self, progress: PrefillProgress) -> bytes:
        piece = InfillAnswer(
            content="",
            stop=False,
            tokens_predicted=self._predicted_tokens,
            tokens_evaluated=self._prompt_tokens,
            prompt_progress=PromptProgress.of(progress),
        )
        return data_frame(self._encoder.encode(piece))

    def push(self, delta: ChoiceDelta) -> bytes:
        self._texts.append(delta.text)
        self._predicted_tokens += len(delta.tokens)
        if delta.finish_reason is not None:
            self._ending = delta
        if not delta.text:
            return b""
        piece = InfillAnswer(
            content=delta.text,
            stop=False,
            tokens_predicted=self._predicted_tokens,
            tokens_evaluated=self._prompt_tokens,
        )
        return data_frame(self._encoder.encode(piece))

    def closing(self, usage: GenerationUsage) -> bytes:
        return data_frame(self._ended("", usage))

    def finish(self, usage: GenerationUsage) -> bytes:
        return self._ended("".join(self._texts), usage)

    def _ended(self, content: str, usage: GenerationUsage) -> bytes:
        assert self._ending is not None, "a generation that closes well has ended"
        return self._encoder.encode(
            InfillAnswer(
                content=content,
                stop=True,
                tokens_predicted=usage.completion_tokens,
                tokens_evaluated=usage.prompt_tokens,
                model=self._model_id,
                tokens_cached=usage.cached_tokens,
                truncated=False,
                stop_type=_stop_type(self._ending),
                stopping_word=self._ending.stop or "",
            )
        )


def _stop_type(ending: ChoiceDelta) -> StopType:
    if ending.finish_reason == "length":
        return "limit"
    return "eos" if ending.stop is None else "word"
