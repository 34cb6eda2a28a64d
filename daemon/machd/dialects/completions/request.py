"""Requests of ``POST /v1/completions``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Self, TypeAlias

from msgspec import UNSET, Meta

from machd.dialects.wire import bounds
from machd.dialects.wire.generation_request import agreed_tokens, check_token_ids
from machd.dialects.wire.other_servers import TrueOnly
from machd.dialects.wire.refusal import refuse_unsupported
from machd.dialects.wire.sampling import SamplingRequest
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.generation import GenerationOptions

Prompt: TypeAlias = str | tuple[int, ...]
"""One prompt: a text, or the ids of its tokens."""

# One list type for OpenAI's three (texts, ids, lists of ids), as a union may hold only one; its
# bound is that of the longest, a list of ids. `prompts` refuses a mixture.
_PromptList: TypeAlias = Annotated[
    list[bounds.ContentText | bounds.TokenId | bounds.TokenIds],
    Meta(min_length=1, max_length=2**20),
]


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """Texts to continue: OpenAI's legacy fields and the extensions of ``SamplingRequest``.

    Attributes:
        suffix: The text after the gap that the completion fills; empty to continue the prompt.
    """

    prompt: bounds.ContentText | _PromptList
    echo: bool | None = None
    best_of: bounds.SamplesPerPrompt | None = None
    logprobs: bounds.CompletionLogprobs | None = None
    suffix: bounds.ContentText | None = None
    add_special_tokens: TrueOnly = UNSET

    def checked(self) -> Self:
        """Check as the base class does, and that ``prompt`` is no mixture."""
        refuse_unsupported(self)
        self.prompts()
        self.constraint()
        self.check_sampling()
        _check_best_of(self.best_of, self.n or 1)
        if self.suffix:
            self.texts()
            for name in ("echo", "truncate_prompt_tokens"):
                if getattr(self, name):
                    raise UnsupportedParameterError(
                        f"{name} together with suffix is not supported; leave one of them out",
                        param=name,
                    )
        return self

    def texts(self) -> tuple[str, ...]:
        """The prompts of a request with ``suffix``; InvalidRequestError if they are token ids."""
        texts = tuple(prompt for prompt in self.prompts() if isinstance(prompt, str))
        if not texts:
            raise InvalidRequestError.at("suffix", "send the prompt as text too, not as token ids")
        return texts

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
            raise InvalidRequestError.at(
                "prompt",
                "send a text, a list of texts, a list of token ids or a list of lists of "
                "token ids, not a mixture",
            )
        if len(self.prompt) > bounds.MAX_PROMPTS:
            raise InvalidRequestError.at(
                "prompt", f"at most {bounds.MAX_PROMPTS} prompts in one request"
            )
        if [] in self.prompt:
            raise InvalidRequestError.at("prompt", "a list of token ids is empty")
        return tuple(tuple(one) if isinstance(one, list) else str(one) for one in self.prompt)

    def check_vocabulary(self, vocabulary_tokens: int) -> None:
        """Check every token id of the request, those of prompts included."""
        SamplingRequest.check_vocabulary(self, vocabulary_tokens)
        for prompt in self.prompts():
            if not isinstance(prompt, str):
                check_token_ids(prompt, vocabulary_tokens=vocabulary_tokens, param="prompt")

    @property
    def echoed_logprobs(self) -> int | None:
        """Alternatives at each position of an echoed prompt; None for no log-probabilities of it."""
        return self.logprobs if self.echo else None

    def asked_tokens(self) -> int | None:
        """Completion tokens as :meth:`SamplingRequest.asked_tokens`; 0 computes the prompt alone."""
        return agreed_tokens(self.token_fields(), least=0)

    def options(self) -> GenerationOptions:
        """Return the options of the generation, free of this dialect."""
        options = self.generation_options(top_logprobs=self.logprobs)
        asked = [one for one in (self.prompt_logprobs, self.echoed_logprobs) if one is not None]
        sampling = replace(options.sampling, prompt_logprobs=max(asked, default=None))
        return replace(options, sampling=sampling)


def _check_best_of(best_of: int | None, n: int) -> None:
    """Raise InvalidRequestError for fewer completions than are asked for, UnsupportedParameterError for more."""
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise InvalidRequestError.at(
            "best_of", f"{best_of} completions are fewer than the {n} of n"
        )
    raise UnsupportedParameterError.at(
        "best_of",
        f"machd answers with every completion that it computes; send n: {best_of} with logprobs: 0, and "
        "take the one whose log-probabilities are largest on average",
    )
