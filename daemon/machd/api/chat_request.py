"""What ``POST /v1/chat/completions`` takes."""

from __future__ import annotations

from typing import Annotated, Self, TypeAlias

from msgspec import UNSET, Raw, UnsetType

from machd.api.bounds import Label, MaxTokens, Metadata, TopLogprobs
from machd.api.messages import ChatMessageList, check_messages, template_messages
from machd.api.options import GenerationOptions
from machd.api.refusal import Ignored, Refused, neutral_values, only, refuse_unsupported
from machd.api.sampling import SamplingRequest
from machd.errors import InvalidRequestError

__all__ = ["ChatCompletionRequest"]

_NoneOnly: TypeAlias = Annotated[Raw | UnsetType, only("none")]
_TextModality: TypeAlias = Annotated[Raw | UnsetType, only(["text"])]
_TextFormat: TypeAlias = Annotated[Raw | UnsetType, only({"type": "text"})]
_TrueOnly: TypeAlias = Annotated[Raw | UnsetType, only(True)]  # noqa: FBT003 - a JSON value
_FalseOnly: TypeAlias = Annotated[Raw | UnsetType, only(False)]  # noqa: FBT003 - a JSON value


class ChatCompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """A conversation to continue: OpenAI's fields and the extensions of ``SamplingRequest``."""

    messages: ChatMessageList
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    metadata: Metadata | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Ignored = UNSET
    prompt_cache_options: Ignored = UNSET
    parallel_tool_calls: bool | None = None

    tools: Refused = UNSET
    tool_choice: _NoneOnly = UNSET
    functions: Refused = UNSET
    function_call: _NoneOnly = UNSET
    response_format: _TextFormat = UNSET
    audio: Refused = UNSET
    modalities: _TextModality = UNSET
    moderation: Refused = UNSET
    prediction: Refused = UNSET
    reasoning_effort: Refused = UNSET
    verbosity: Refused = UNSET
    web_search_options: Refused = UNSET
    store: _FalseOnly = UNSET

    # A template is code that runs in the daemon (CVE-2025-61620): it comes with the model only.
    chat_template: Refused = UNSET
    chat_template_kwargs: Refused = UNSET
    add_generation_prompt: _TrueOnly = UNSET
    continue_final_message: _FalseOnly = UNSET

    def checked(self) -> Self:
        """The request, once what no single field's bounds can say holds too.

        Raises:
            InvalidRequestError: Fields contradict each other.
            UnsupportedParameterError: A field asks for what machd does not do.
        """
        refuse_unsupported(self, _NEUTRAL)
        check_messages(self.messages)
        self.check_stream_options()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ; send one of them", param="max_tokens"
            )
        return self

    def options(self) -> GenerationOptions:
        """What is asked of the generation, free of this dialect."""
        return self.generation_options(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def template_messages(self) -> list[dict[str, object]]:
        """The conversation as a chat template sees it."""
        return template_messages(self.messages)


_NEUTRAL = neutral_values(ChatCompletionRequest)
