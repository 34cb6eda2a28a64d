"""The request fields that chat completions and completions share."""

from __future__ import annotations

from msgspec import UNSET, Struct

from machd.api.bounds import (
    CacheSalt,
    Choices,
    Fraction,
    GrammarText,
    Label,
    LogitBias,
    MaxTokens,
    MinP,
    Penalty,
    PriorityName,
    RegexText,
    RepetitionPenalty,
    SamplesPerPrompt,
    Seed,
    Stop,
    StopTokenIds,
    StreamInterval,
    Temperature,
    TopK,
)
from machd.api.constraint import Constraint
from machd.api.generation_request import GenerationRequest, given_or
from machd.api.options import GenerationOptions
from machd.api.raw_json import ObjectSource
from machd.api.refusal import Ignored, Refused
from machd.api.response_format import (
    ResponseFormat,
    StructuredOutputs,
    format_constraint,
    one_constraint,
    source_constraints,
)
from machd.api.token_ids import check_token_ids
from machd.errors import InvalidRequestError

__all__ = ["SamplingRequest", "StreamOptions"]


class StreamOptions(Struct, frozen=True, kw_only=True):
    """``stream_options``. Null means the default throughout, as in OpenAI's API.

    Attributes:
        include_usage: Send one more event, with the usage and no choices, before the end.
        include_obfuscation: Accepted; machd pads nothing.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingRequest(GenerationRequest, frozen=True, kw_only=True):
    """How to generate. Null means the default throughout, as in OpenAI's API.

    From ``top_k`` to ``stop_token_ids`` the fields are extensions that other servers spell the
    same way; ``priority`` is machd's own, ``cache_salt`` vLLM's. What follows are the ways to say what the answer has to
    look like: OpenAI's, and vLLM's older and newer ones.
    """

    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    n: SamplesPerPrompt | None = None
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    user: Label | None = None

    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    stream_interval: StreamInterval | None = None
    stop_token_ids: StopTokenIds | None = None
    priority: PriorityName | None = None
    cache_salt: CacheSalt | None = None

    response_format: ResponseFormat | None = None
    guided_json: ObjectSource = UNSET
    guided_regex: RegexText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_decoding_backend: Ignored = UNSET
    guided_whitespace_pattern: Refused = UNSET

    def constraint(self) -> Constraint | None:
        """What the answer has to look like; None for any text.

        Raises:
            InvalidRequestError: There are two answers to that, a schema is no JSON object or too
                long, or the end of text, which alone ends what is constrained, is to be ignored.
            UnsupportedParameterError: ``structured_outputs`` asks for what machd does not do.
        """
        found = one_constraint(
            [
                format_constraint(self.response_format),
                *source_constraints(
                    self.guided_json,
                    self.guided_regex,
                    self.guided_choice,
                    self.guided_grammar,
                    prefix="guided_",
                ),
                *(self.structured_outputs.constraints() if self.structured_outputs else ()),
            ]
        )
        if found is not None and self.ignore_eos:
            raise InvalidRequestError(
                f"ignore_eos and {found.param} contradict each other; send one of them",
                param="ignore_eos",
            )
        return found

    def check_vocabulary(self, vocabulary_tokens: int) -> None:
        """Hold the token ids of ``logit_bias`` and ``stop_token_ids`` against the model's.

        Raises:
            InvalidRequestError: An id is outside the vocabulary.
        """
        for param, token_ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
        ):
            check_token_ids(token_ids or (), vocabulary_tokens=vocabulary_tokens, param=param)

    def generation_options(
        self,
        *,
        max_tokens: int | None,
        top_logprobs: int | None,
        priority: PriorityName | None = None,
    ) -> GenerationOptions:
        """The dialect-free form, given the values that the dialects spell differently."""
        return GenerationOptions(
            max_tokens=max_tokens,
            temperature=given_or(self.temperature, 1.0),
            top_p=given_or(self.top_p, 1.0),
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=given_or(self.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            seed=self.seed,
            top_logprobs=top_logprobs,
            stop=_stop_texts(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            n=self.n or 1,
            stream=bool(self.stream),
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            stream_interval=self.stream_interval,
            priority=priority or self.priority or "normal",
            cache_salt=self.cache_salt,
        )


def _stop_texts(stop: Stop | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)
