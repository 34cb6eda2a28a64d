"""Requests of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.dialects.anthropic.tools import (
    AnthropicToolChoice,
    AnthropicToolList,
    anthropic_tool_choice,
    anthropic_tools,
)
from machd.dialects.anthropic.turns import AnthropicMessageList, SystemContent, read_turns
from machd.dialects.wire.bounds import CacheSalt, Label, StopText, TopP
from machd.dialects.wire.generation_request import GenerationRequest, SamplingFields
from machd.dialects.wire.raw_json import Schema
from machd.dialects.wire.refusal import Ignored, Refused, only, refuse_unsupported
from machd.dialects.wire.response_format import json_schema_constraint, one_constraint
from machd.errors import InvalidRequestError
from machd.request.constraint import Constraint
from machd.request.conversation import Conversation
from machd.request.generation import GenerationOptions

_Temperature: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
_TopK: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_StopSequences: TypeAlias = Annotated[list[StopText], Meta(max_length=64)]
_Tokens: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Display: TypeAlias = Literal["summarized", "omitted"]

# Coding agents send one of the longer ones with every request: that nothing be taken out.
_NoEdits: TypeAlias = Annotated[
    Raw | UnsetType,
    only(
        {"edits": []},
        *(
            {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}
            for keep in ("all", {"type": "all"})
        ),
    ),
]


class ThinkingEnabled(Struct, frozen=True, kw_only=True, tag="enabled", tag_field="type"):
    """Think first, for so many tokens at most."""

    budget_tokens: _Tokens
    display: _Display | None = None


class ThinkingAdaptive(Struct, frozen=True, kw_only=True, tag="adaptive", tag_field="type"):
    """Think or not, as the model's template has it."""

    display: _Display | None = None


class ThinkingDisabled(Struct, frozen=True, kw_only=True, tag="disabled", tag_field="type"):
    """Do not think first, where the model can be told so."""


ThinkingConfig: TypeAlias = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class JsonSchemaOutput(Struct, frozen=True, kw_only=True, tag="json_schema", tag_field="type"):
    """An answer of JSON that follows a schema."""

    schema: Schema


class OutputConfig(Struct, frozen=True, kw_only=True):
    """Form of the answer.

    Attributes:
        effort: What a model makes of the word is its template's.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaOutput | None = None


class MessagesMetadata(Struct, frozen=True, kw_only=True):
    """Notes of the client's own."""

    user_id: Label | None = None


class CountTokensRequest(GenerationRequest, frozen=True, kw_only=True):
    """A conversation in Anthropic's words. Null means the default throughout.

    Attributes:
        output_format: What ``output_config.format`` was called before.
        context_management: Accepted only where it asks for no change.
    """

    uses_tokens: ClassVar[bool] = False
    takes_media: ClassVar[bool] = True

    messages: AnthropicMessageList
    system: SystemContent | None = None
    tools: AnthropicToolList | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonSchemaOutput | None = None

    cache_control: Ignored = UNSET
    speed: Ignored = UNSET
    mcp_servers: Refused = UNSET
    context_management: _NoEdits = UNSET

    def checked(self) -> Self:
        """Return the request; UnsupportedParameterError if it asks for what machd does not do."""
        refuse_unsupported(self)
        return self

    def conversation(self) -> Conversation:
        """Return the conversation to continue, free of this dialect.

        Raises:
            UnsupportedParameterError: A block or a tool is of a kind that machd does not take.
            InvalidRequestError: The messages do not follow each other as they have to, or fields
                contradict each other.
        """
        turns = read_turns(self.system, self.messages)
        thinking = self.thinking
        if turns.continues_final_message and isinstance(thinking, ThinkingEnabled):
            raise InvalidRequestError.at(
                "thinking",
                "a final message of the assistant's cannot be continued with thoughts; "
                "send one or the other",
            )
        tools = anthropic_tools(self.tools)
        return Conversation(
            messages=turns.messages,
            tools=tools,
            tool_choice=anthropic_tool_choice(self.tool_choice, tools),
            constraint=self._constraint(),
            thinks=self._thinks(is_prefilled=turns.continues_final_message),
            thinking_budget_tokens=(
                thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None
            ),
            template_variables=self._template_variables(),
            continues_final_message=turns.continues_final_message,
            is_located=self.tells_cache,
            message_indices=turns.indices,
        )

    @property
    def tells_cache(self) -> bool:
        """True if the usage has the cache's diagnosis."""
        return False

    @property
    def shows_thoughts(self) -> bool:
        """True if the answer shows the model's thoughts."""
        if isinstance(self.thinking, ThinkingEnabled | ThinkingAdaptive):
            return self.thinking.display != "omitted"
        return True

    def _thinks(self, *, is_prefilled: bool) -> bool | None:
        match self.thinking:
            case ThinkingEnabled():
                return True
            case ThinkingAdaptive():
                return False if is_prefilled else None
            case _:
                return False

    def _constraint(self) -> Constraint | None:
        asked = [
            json_schema_constraint(output.schema, param=f"{param}.schema") if output else None
            for param, output in (
                ("output_config.format", self.output_config and self.output_config.format),
                ("output_format", self.output_format),
            )
        ]
        return one_constraint(asked)

    def _template_variables(self) -> Mapping[str, object]:
        effort = self.output_config.effort if self.output_config is not None else None
        if effort is None:
            return MappingProxyType({})
        return MappingProxyType({"reasoning_effort": effort})


class DiagnosticsRequest(Struct, frozen=True, kw_only=True):
    """``diagnostics``: compare the request with an earlier one.

    Attributes:
        previous_message_id: ``id`` of the answer to the earlier one; null for the first turn of a conversation, which is kept
            to compare later ones with.
    """

    previous_message_id: Label | None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A conversation to continue, and how.

    Attributes:
        cache_salt: An extension, as in chat completions.
        return_cache_diagnosis: The same.
    """

    max_tokens: _Tokens
    stop_sequences: _StopSequences | None = None
    stream: bool | None = None
    temperature: _Temperature | None = None
    top_p: TopP | None = None
    top_k: _TopK | None = None

    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: DiagnosticsRequest | None = None
    cache_salt: CacheSalt | None = None
    return_cache_diagnosis: bool | None = None
    inference_geo: Ignored = UNSET
    user_profile_id: Ignored = UNSET
    workspace_id: Ignored = UNSET
    container: Refused = UNSET

    @property
    def is_stream(self) -> bool:
        """Whether it asks for a stream."""
        return bool(self.stream)

    @property
    def tells_cache(self) -> bool:
        """True if the usage has the cache's diagnosis."""
        return bool(self.return_cache_diagnosis)

    def options(self) -> GenerationOptions:
        """Return the options of the generation, free of this dialect."""
        shared = SamplingFields(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            stream=self.stream,
            cache_salt=self.cache_salt,
        )
        return shared.shared_options(max_tokens=self.max_tokens)
