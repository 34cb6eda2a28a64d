"""What ``POST /v1/chat/completions`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, UnsetType

from machd.api.bounds import Label, MaxTokens, Metadata, PriorityName, ThinkingBudget, TopLogprobs
from machd.api.chat_completion import UsedTier
from machd.api.conversation import Conversation, ToolChoiceMode
from machd.api.generation_request import check_stream_options
from machd.api.messages import (
    ChatMessageList,
    check_final_message,
    check_messages,
    template_messages,
)
from machd.api.options import GenerationOptions
from machd.api.reasoning import (
    ReasoningEffort,
    ReasoningOptions,
    TemplateVariables,
    reasoning_options,
)
from machd.api.refusal import Ignored, Refused, neutral_values, only, refuse_unsupported
from machd.api.sampling import SamplingRequest
from machd.api.tools import ChatToolChoice, ChatToolList, chat_tool_choice, chat_tools
from machd.errors import InvalidRequestError, UnsupportedParameterError

__all__ = ["TIER_PRIORITIES", "ChatCompletionRequest", "ServiceTier", "Verbosity"]

ServiceTier: TypeAlias = Literal["auto", "default", "flex", "scale", "priority"]
"""OpenAI's word for who goes first."""

TIER_PRIORITIES: Mapping[str, PriorityName] = MappingProxyType(
    {"flex": "batch", "priority": "interactive"}
)
"""What the tiers are here; the others change nothing."""

Verbosity: TypeAlias = Annotated[
    Literal["low", "medium", "high"],
    Meta(description="Accepted; does not change the answer, as no open model is told of it."),
]
"""How long OpenAI's own models are to make their answers."""

_NoneOnly: TypeAlias = Annotated[Raw | UnsetType, only("none")]
_TextModality: TypeAlias = Annotated[Raw | UnsetType, only(["text"])]
_FalseOnly: TypeAlias = Annotated[Raw | UnsetType, only(False)]  # noqa: FBT003 - a JSON value


class ChatCompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """A conversation to continue: OpenAI's fields and the extensions of ``SamplingRequest``.

    From ``chat_template_kwargs`` on, the fields are extensions that other servers spell the same
    way, up to those that are refused.
    """

    messages: ChatMessageList
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None

    tools: ChatToolList | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    metadata: Metadata | None = None
    service_tier: ServiceTier | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Ignored = UNSET
    prompt_cache_options: Ignored = UNSET
    verbosity: Verbosity | None = None

    chat_template_kwargs: TemplateVariables | None = None
    thinking_token_budget: ThinkingBudget | None = None
    thinking_budget: ThinkingBudget | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    functions: Refused = UNSET
    function_call: _NoneOnly = UNSET
    audio: Refused = UNSET
    modalities: _TextModality = UNSET
    moderation: Refused = UNSET
    prediction: Refused = UNSET
    web_search_options: Refused = UNSET
    store: _FalseOnly = UNSET

    # A template is code that runs in the daemon (CVE-2025-61620): it comes with the model only.
    chat_template: Refused = UNSET

    def checked(self) -> Self:
        """The request, once what no single field's bounds can say holds too.

        What is said of :meth:`conversation` is left to it.

        Raises:
            InvalidRequestError: Fields contradict each other.
            UnsupportedParameterError: A field asks for what machd does not do.
        """
        refuse_unsupported(self, _NEUTRAL)
        check_messages(self.messages)
        check_stream_options(self.stream_options, is_stream=self.stream)
        self._check_continuation()
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
            priority=self.priority or TIER_PRIORITIES.get(self.service_tier or "default"),
        )

    def conversation(self) -> Conversation:
        """What is to be continued, free of this dialect.

        Raises:
            InvalidRequestError: Fields about tools, thoughts or the answer's shape contradict
                each other, or a schema or a call's arguments are beyond their bounds.
            UnsupportedParameterError: One of them asks for what machd does not do.
        """
        choice, tools = chat_tool_choice(
            self.tool_choice,
            chat_tools(self.tools),
            parallel_tool_calls=self.parallel_tool_calls,
        )
        if choice.mode is ToolChoiceMode.REQUIRED and self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos and tool_choice contradict each other; send one of them",
                param="ignore_eos",
            )
        reasoning = self._reasoning()
        return Conversation(
            messages=self.template_messages(),
            tools=tools,
            tool_choice=choice,
            constraint=self.constraint(),
            thinks=reasoning.thinks,
            thinking_budget_tokens=reasoning.budget_tokens,
            template_variables=reasoning.template_variables,
            continues_final_message=bool(self.continue_final_message),
        )

    def template_messages(self) -> list[dict[str, object]]:
        """The conversation as a chat template sees it."""
        return template_messages(self.messages)

    @property
    def used_tier(self) -> UsedTier | UnsetType:
        """``service_tier`` as the answer repeats it; it is not there unless asked for."""
        if self.service_tier is None:
            return UNSET
        return "default" if self.service_tier == "auto" else self.service_tier

    def _reasoning(self) -> ReasoningOptions:
        return reasoning_options(
            effort=self.reasoning_effort,
            variables=self.chat_template_kwargs,
            budgets={
                "thinking_token_budget": self.thinking_token_budget,
                "thinking_budget": self.thinking_budget,
            },
        )

    def _check_continuation(self) -> None:
        opens_turn = self.add_generation_prompt is not False
        if not self.continue_final_message:
            if not opens_turn:
                raise UnsupportedParameterError(
                    "add_generation_prompt: false is supported together with "
                    "continue_final_message: true only",
                    param="add_generation_prompt",
                )
            return
        if opens_turn:
            raise InvalidRequestError(
                "continue_final_message needs add_generation_prompt: false",
                param="continue_final_message",
            )
        check_final_message(self.messages)


_NEUTRAL = neutral_values(ChatCompletionRequest)
