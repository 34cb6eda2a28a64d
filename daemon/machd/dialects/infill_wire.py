"""What ``POST /infill`` takes and answers: llama.cpp's endpoint for the text in the middle."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from machd.dialects.wire.bounds import ContentText
from machd.dialects.wire.generation_request import agreed_tokens
from machd.dialects.wire.refusal import Ignored, neutral_values, refuse_unsupported
from machd.dialects.wire.sampling import SamplingRequest
from machd.errors import UnsupportedParameterError
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
        """The request, once what no single field's bounds can say holds too.

        Raises:
            InvalidRequestError: Fields contradict each other.
            UnsupportedParameterError: A field asks for what machd does not do.
        """
        refuse_unsupported(self, _NEUTRAL)
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
        """What is asked of the generation, free of this dialect."""
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


_NEUTRAL = neutral_values(InfillRequest)
