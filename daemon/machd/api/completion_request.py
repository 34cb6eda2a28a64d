"""What ``POST /v1/completions`` takes."""

from __future__ import annotations

from typing import Annotated, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, UnsetType

from machd.api.bounds import (
    MAX_PROMPTS,
    CompletionLogprobs,
    ContentText,
    SamplesPerPrompt,
    TokenId,
    TokenIds,
)
from machd.api.generation_request import check_stream_options
from machd.api.options import GenerationOptions
from machd.api.refusal import neutral_values, only, refuse_unsupported
from machd.api.sampling import SamplingRequest
from machd.api.token_ids import check_token_ids
from machd.errors import InvalidRequestError, UnsupportedParameterError

__all__ = ["CompletionRequest", "Prompt"]

Prompt: TypeAlias = str | tuple[int, ...]
"""One prompt: a text, or the ids of its tokens."""

# One list type for OpenAI's three (texts, ids, lists of ids), as a union may hold only one; its
# bound is that of the longest, a list of ids. `prompts` refuses a mixture.
_PromptList: TypeAlias = Annotated[
    list[ContentText | TokenId | TokenIds], Meta(min_length=1, max_length=2**20)
]
_EmptyText: TypeAlias = Annotated[Raw | UnsetType, only("")]


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """Texts to continue: OpenAI's legacy fields and the extensions of ``SamplingRequest``."""

    prompt: ContentText | _PromptList
    echo: bool | None = None
    best_of: SamplesPerPrompt | None = None
    logprobs: CompletionLogprobs | None = None
    suffix: _EmptyText = UNSET

    def checked(self) -> Self:
        """The request, once what no single field's bounds can say holds too.

        Raises:
            InvalidRequestError: Fields contradict each other, or ``prompt`` is a mixture.
            UnsupportedParameterError: A field asks for what machd does not do.
        """
        refuse_unsupported(self, _NEUTRAL)
        self.prompts()
        self.constraint()
        check_stream_options(self.stream_options, is_stream=self.stream)
        if self.best_of not in (None, self.n or 1):
            raise UnsupportedParameterError(
                "best_of is not supported unless it equals n; leave it out", param="best_of"
            )
        if self.echo and self.logprobs is not None:
            raise UnsupportedParameterError(
                "echo together with logprobs is not supported; leave one of them out", param="echo"
            )
        return self

    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts, one to ``MAX_PROMPTS``; a text may be empty, a list of ids may not.

        Raises:
            InvalidRequestError: The list is a mixture, holds an empty list or too many prompts.
        """
        if isinstance(self.prompt, str):
            return (self.prompt,)
        token_ids = tuple(one for one in self.prompt if isinstance(one, int))
        if len(token_ids) == len(self.prompt):
            return (token_ids,)
        kinds = {type(one) for one in self.prompt}
        if len(kinds) > 1:
            raise InvalidRequestError(
                "prompt: send a text, a list of texts, a list of token ids or a list of lists of "
                "token ids, not a mixture",
                param="prompt",
            )
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"prompt: at most {MAX_PROMPTS} prompts in one request", param="prompt"
            )
        if [] in self.prompt:
            raise InvalidRequestError("prompt: a list of token ids is empty", param="prompt")
        return tuple(tuple(one) if isinstance(one, list) else str(one) for one in self.prompt)

    def check_vocabulary(self, vocabulary_tokens: int) -> None:
        """Hold every token id of the request, prompts included, against the model's.

        Raises:
            InvalidRequestError: An id is outside the vocabulary.
        """
        SamplingRequest.check_vocabulary(self, vocabulary_tokens)
        for prompt in self.prompts():
            if not isinstance(prompt, str):
                check_token_ids(prompt, vocabulary_tokens=vocabulary_tokens, param="prompt")

    def options(self) -> GenerationOptions:
        """What is asked of the generation, free of this dialect."""
        return self.generation_options(max_tokens=self.max_tokens, top_logprobs=self.logprobs)


_NEUTRAL = neutral_values(CompletionRequest)
