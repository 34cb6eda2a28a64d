"""Requests of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.dialects.chat.messages import (
    ChatMessageList,
    TextPart,
    check_final_message,
    check_messages,
    template_messages,
)
from machd.dialects.wire import bounds
from machd.dialects.wire.generation_request import ServiceTier, UsedTier
from machd.dialects.wire.other_servers import FalseOnly, OneOnly
from machd.dialects.wire.reasoning import (
    ReasoningEffort,
    ReasoningOptions,
    TemplateVariables,
    reasoning_options,
)
from machd.dialects.wire.refusal import Ignored, Refused, only, refuse_unsupported
from machd.dialects.wire.sampling import SamplingRequest
from machd.dialects.wire.tools import (
    ChatToolChoice,
    ChatToolList,
    LegacyFunctionChoice,
    LegacyFunctionList,
    chat_tool_choice,
    chat_tools,
    legacy_tool_choice,
)
from machd.errors import InvalidRequestError, UnsupportedParameterError
from machd.request.conversation import Conversation, FunctionTool, ToolChoice, ToolChoiceMode
from machd.request.generation import GenerationOptions

Verbosity: TypeAlias = Annotated[
    Literal["low", "medium", "high"],
    Meta(description="Accepted; does not change the answer, as no open model is told of it."),
]
"""How long OpenAI's own models are to make their answers."""

_TextModality: TypeAlias = Annotated[Raw | UnsetType, only(["text"])]


class Prediction(Struct, frozen=True, kw_only=True, tag="content", tag_field="type"):
    """A text that the answer may repeat: where tokens are proposed by look-up, it is looked up there."""

    content: bounds.ContentText | Annotated[list[TextPart], Meta(max_length=1024)]

    @property
    def text(self) -> str:
        """The whole of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """A conversation to continue: OpenAI's fields and the extensions of ``SamplingRequest``.

    From ``chat_template_kwargs`` on, the fields are extensions that other servers spell the same
    way, up to those that are refused.
    """

    takes_media: ClassVar[bool] = True

    messages: ChatMessageList
    max_completion_tokens: bounds.MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: bounds.TopLogprobs | None = None

    tools: ChatToolList | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    metadata: bounds.Metadata | None = None
    service_tier: ServiceTier | None = None
    safety_identifier: bounds.UnusedLabel | None = None
    prompt_cache_key: bounds.UnusedLabel | None = None
    prompt_cache_retention: Ignored = UNSET
    prompt_cache_options: Ignored = UNSET
    verbosity: Verbosity | None = None

    chat_template_kwargs: TemplateVariables | None = None
    thinking_token_budget: bounds.ThinkingBudget | None = None
    thinking_budget: bounds.ThinkingBudget | None = None
    thinking_budget_tokens: bounds.ThinkingBudget | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    functions: LegacyFunctionList | None = None
    function_call: LegacyFunctionChoice | None = None
    prediction: Prediction | None = None
    store: bool | None = None

    add_special_tokens: FalseOnly = UNSET
    audio: Refused = UNSET
    best_of: OneOnly = UNSET
    echo: FalseOnly = UNSET
    modalities: _TextModality = UNSET
    moderation: Refused = UNSET
    web_search_options: Refused = UNSET

    # A template is code that runs in the daemon (CVE-2025-61620): it comes with the model only.
    chat_template: Refused = UNSET

    def checked(self) -> Self:
        """Check as the base class does, but for what :meth:`conversation` checks."""
        refuse_unsupported(self)
        self.check_sampling()
        check_messages(self.messages)
        self._check_continuation()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    def token_fields(self) -> Mapping[str, int | None]:
        """The fields that say how many tokens a completion may have."""
        return {"max_completion_tokens": self.max_completion_tokens, **super().token_fields()}

    def options(self) -> GenerationOptions:
        """Return the options of the generation, free of this dialect."""
        return self.generation_options(
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            service_tier=self.service_tier,
        )

    def conversation(self) -> Conversation:
        """Return the conversation to continue, free of this dialect.

        Raises:
            InvalidRequestError: Fields about tools, thoughts or the answer's shape contradict
                each other, or a schema or a call's arguments are beyond their bounds.
            UnsupportedParameterError: One of them asks for what machd does not do.
        """
        choice, tools = self._tool_choice()
        if choice.mode is ToolChoiceMode.REQUIRED:
            self.check_free_ending("tool_choice")
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
            is_located=bool(self.return_cache_diagnosis),
            max_prompt_tokens=self.truncate_prompt_tokens,
            prediction=None if self.prediction is None else self.prediction.text,
        )

    def template_messages(self) -> list[dict[str, object]]:
        """The conversation as a chat template sees it."""
        return template_messages(self.messages)

    @property
    def is_legacy(self) -> bool:
        """True if calls are asked for, and answered, as OpenAI's API had them before tools."""
        return bool(self.functions)

    @property
    def used_tier(self) -> UsedTier | UnsetType:
        """``service_tier`` as the answer repeats it; it is not there unless asked for."""
        if self.service_tier is None:
            return UNSET
        return "default" if self.service_tier == "auto" else self.service_tier

    def _tool_choice(self) -> tuple[ToolChoice, tuple[FunctionTool, ...]]:
        if not self.is_legacy:
            return chat_tool_choice(
                self.tool_choice,
                chat_tools(self.tools),
                parallel_tool_calls=self.parallel_tool_calls,
            )
        if self.tools:
            raise InvalidRequestError("tools and functions: send one of them", param="functions")
        return legacy_tool_choice(self.function_call, self.functions or [])

    def _reasoning(self) -> ReasoningOptions:
        return reasoning_options(
            effort=self.reasoning_effort,
            variables=self.chat_template_kwargs,
            budgets={
                "thinking_token_budget": self.thinking_token_budget,
                "thinking_budget": self.thinking_budget,
                "thinking_budget_tokens": self.thinking_budget_tokens,
            },
        )

    def _check_continuation(self) -> None:
        if self.continue_final_message:
            check_final_message(self.messages, opens_turn=self.add_generation_prompt)
        elif self.add_generation_prompt is False:
            raise UnsupportedParameterError.at(
                "add_generation_prompt",
                "false is supported together with continue_final_message: true only",
            )
