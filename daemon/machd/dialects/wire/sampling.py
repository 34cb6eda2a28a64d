"""The request fields that chat completions and completions share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msgspec import UNSET, Struct

from machd.dialects.wire import bounds
from machd.dialects.wire.generation_request import agreed, agreed_tokens, check_token_ids
from machd.dialects.wire.other_servers import OtherServersFields
from machd.dialects.wire.raw_json import ObjectSource
from machd.dialects.wire.refusal import Ignored, Refused
from machd.dialects.wire.response_format import (
    ResponseFormat,
    StructuredOutputs,
    forbidden_constraint,
    format_constraint,
    ollama_constraint,
    one_constraint,
    schema_constraints,
    source_constraints,
)
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.constraint import Constraint
from machd.request.generation import GenerationOptions

_WHOLE_TEXT = -1
"""As a window of the repetition penalty: prompt and completion, which is what machd does."""


class StreamOptions(Struct, frozen=True, kw_only=True):
    """``stream_options``. Null means the default throughout, as in OpenAI's API.

    Attributes:
        include_usage: Send one more event, with the usage and no choices, before the end.
        include_obfuscation: Accepted; machd pads nothing.
        continuous_usage_stats: Accepted; the usage comes once, at the end.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingRequest(OtherServersFields, frozen=True, kw_only=True):
    """Sampling fields. Null means the default throughout, as in OpenAI's API.

    From ``repeat_penalty`` on the fields are extensions, spelled as vLLM and llama.cpp spell them. The
    last group says what the answer has to look like, in every
    server's words.

    Attributes:
        n_predict: llama.cpp's ``max_tokens``.
        repeat_penalty: llama.cpp's ``repetition_penalty``.
        repeat_last_n: Its window, in tokens; machd looks at the whole text.
        min_tokens: Tokens before which the completion does not end by itself.
        bad_words: Texts that do not occur in the answer.
        truncate_prompt_tokens: Keep the end of a longer prompt; of a conversation, its latest turns.
        return_cache_diagnosis: Say in the usage why the prefix cache had no more of the prompt.
    """

    max_tokens: bounds.MaxTokens | None = None
    n: bounds.SamplesPerPrompt | None = None
    stream_options: StreamOptions | None = None
    logit_bias: bounds.LogitBias | None = None
    user: bounds.UnusedLabel | None = None

    repeat_penalty: bounds.RepetitionPenalty | None = None
    repeat_last_n: bounds.RepetitionWindow | None = None
    n_predict: bounds.MaxTokens | None = None
    min_tokens: bounds.MinTokens | None = None
    ignore_eos: bool | None = None
    stop_token_ids: bounds.StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: bounds.AllowedTokenIds | None = None
    prompt_logprobs: bounds.PromptLogprobs | None = None
    truncate_prompt_tokens: bounds.TruncatedTokens | None = None
    return_cache_diagnosis: bool | None = None

    response_format: ResponseFormat | None = None
    guided_json: ObjectSource = UNSET
    guided_regex: bounds.RegexText | None = None
    guided_choice: bounds.Choices | None = None
    guided_grammar: bounds.GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: ObjectSource = UNSET
    grammar: bounds.GrammarText | None = None
    format: ObjectSource = UNSET
    bad_words: bounds.ForbiddenTexts | None = None
    guided_decoding_backend: Ignored = UNSET
    guided_whitespace_pattern: Refused = UNSET

    def constraint(self) -> Constraint | None:
        """The one constraint of the answer, whichever field asks for it; None for any text.

        Raises:
            InvalidRequestError: There are two answers to that, a schema is no JSON object or too
                long, or another field says where the text ends.
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
                *schema_constraints(self.json_schema, self.grammar),
                ollama_constraint(self.format),
                forbidden_constraint(self.bad_words),
            ]
        )
        if found is not None:
            self.check_free_ending(found.param)
        return found

    def check_free_ending(self, param: str) -> None:
        """Raise InvalidRequestError for a field that keeps the grammar of ``param`` from ending its text."""
        for name in ("ignore_eos", "min_tokens", "allowed_token_ids"):
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} and {param} contradict each other; send one of them", param=name
                )

    def check_sampling(self) -> None:
        """Check the sampling fields against each other, other servers' spellings included.

        Raises:
            InvalidRequestError: Fields contradict each other.
            UnsupportedParameterError: The repetition penalty has a window.
        """
        asked_tokens = self.asked_tokens()
        agreed_tokens({"truncate_prompt_tokens": self.truncate_prompt_tokens})
        if self.min_tokens and asked_tokens is not None and 0 <= asked_tokens < self.min_tokens:
            raise InvalidRequestError.at("min_tokens", "more than the completion may have")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs are not available together with stream: true; leave one of them out",
                param="prompt_logprobs",
            )
        penalty = self._repetition_penalty()
        if self.repeat_last_n not in (None, _WHOLE_TEXT) and penalty != 1.0:
            raise UnsupportedParameterError.at(
                "repeat_last_n",
                f"the repetition penalty looks at the whole text; send {_WHOLE_TEXT}",
            )

    def asked_tokens(self) -> int | None:
        """Completion tokens that are asked for; None where no field says.

        Raises:
            InvalidRequestError: Two fields differ, or one is out of range.
        """
        return agreed_tokens(self.token_fields())

    def token_fields(self) -> Mapping[str, int | None]:
        """The fields that say how many tokens a completion may have."""
        return {"max_tokens": self.max_tokens, "n_predict": self.n_predict}

    def check_vocabulary(self, vocabulary_tokens: int) -> None:
        """Check the token ids of all fields."""
        for param, token_ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            check_token_ids(token_ids or (), vocabulary_tokens=vocabulary_tokens, param=param)

    def generation_options(
        self, *, top_logprobs: int | None, service_tier: str | None = None
    ) -> GenerationOptions:
        """Read all fields, beside what the dialects spell differently."""
        shared = self.shared_options(
            max_tokens=self.asked_tokens(), top_logprobs=top_logprobs, service_tier=service_tier
        )
        sampling = replace(
            shared.sampling,
            repetition_penalty=self._repetition_penalty(),
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            allowed_token_ids=tuple(sorted(set(self.allowed_token_ids or ()))),
            min_tokens=self.min_tokens or 0,
            prompt_logprobs=self.prompt_logprobs,
        )
        return replace(
            shared,
            sampling=sampling,
            shows_stop=bool(self.include_stop_str_in_output),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            n=self.n or 1,
            include_usage=bool(
                self.stream and self.stream_options and self.stream_options.include_usage
            ),
            tells_progress=bool(self.stream and self.return_progress),
            includes_cache_diagnosis=bool(self.return_cache_diagnosis),
        )

    def _repetition_penalty(self) -> float:
        fields = {
            "repetition_penalty": self.repetition_penalty,
            "repeat_penalty": self.repeat_penalty,
        }
        return agreed(fields) or 1.0
