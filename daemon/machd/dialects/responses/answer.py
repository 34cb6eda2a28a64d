"""Answers of ``/v1/responses``: OpenAI's response object, its items, and the events of a stream."""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.dialects.responses.tools import CustomInputFormat, SchemaTextFormat
from machd.dialects.usage import CacheDiagnosisDetails
from machd.dialects.wire.response_format import JsonObjectFormat, TextFormat
from machd.generations.generation import GenerationUsage

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ResponseStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]

_JsonObject = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
"""An object of the request's that is given back as it came."""


class OutputTopLogprob(Struct, frozen=True, kw_only=True):
    """One alternative at a position; ``bytes`` are the token's own, 0 to 255 each."""

    token: str
    logprob: float
    bytes: list[int]


class OutputTokenLogprob(OutputTopLogprob, frozen=True, kw_only=True):
    """The token at a position, with its likeliest alternatives, best first."""

    top_logprobs: list[OutputTopLogprob]


class OutputText(Struct, frozen=True, kw_only=True, tag="output_text", tag_field="type"):
    """A message's text.

    Attributes:
        annotations: Always empty: machd cites nothing.
        logprobs: One entry for each token, if they were asked for.
    """

    text: str
    annotations: list[str] = []
    logprobs: list[OutputTokenLogprob] = []


class ReasoningText(Struct, frozen=True, kw_only=True, tag="reasoning_text", tag_field="type"):
    """Thoughts, as the model wrote them."""

    text: str


class MessageItem(Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    """A text of the model's for the user."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, frozen=True, kw_only=True, tag="reasoning", tag_field="type"):
    """The model's thoughts. ``summary`` is always empty: there are the thoughts themselves."""

    id: str
    status: ItemStatus
    summary: list[str] = []
    content: list[ReasoningText]


class FunctionCallItem(Struct, frozen=True, kw_only=True, tag="function_call", tag_field="type"):
    """A function that the model asks for.

    Attributes:
        id: Of the item.
        call_id: Of the call, which its output has to name.
        arguments: JSON text of an object; cut short where the status is ``incomplete``.
    """

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class CustomToolCallItem(
    Struct, frozen=True, kw_only=True, tag="custom_tool_call", tag_field="type"
):
    """A custom tool that the model asks for.

    Attributes:
        id: Of the item.
        call_id: Of the call, which its output has to name.
        input: Any text.
    """

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus


OutputItem: TypeAlias = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(Struct, frozen=True, kw_only=True):
    """Part of the input's tokens.

    Attributes:
        cached_tokens: Taken from the prefix cache instead of computed.
        cache_write_tokens: Zero; what is cached is not charged for.
        cache_diagnosis: Left out unless asked for, and without a prefix cache.
    """

    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_diagnosis: CacheDiagnosisDetails | UnsetType = UNSET


class OutputTokensDetails(Struct, frozen=True, kw_only=True):
    """Part of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True, kw_only=True):
    """Tokens that a response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: GenerationUsage, *, tells_cache: bool = False) -> Self:
        """Return the usage of a generation, with its total, and with the cache's diagnosis if ``tells_cache``."""
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.cached_tokens,
                cache_diagnosis=CacheDiagnosisDetails.of(usage, is_asked=tells_cache),
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


class IncompleteDetails(Struct, frozen=True, kw_only=True):
    """Why a response stopped early: ``max_output_tokens``, or the end of the context."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFailure(Struct, frozen=True, kw_only=True):
    """Why a response failed after it had begun; the codes are OpenAI's."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class FunctionToolEcho(Struct, frozen=True, kw_only=True, tag="function", tag_field="type"):
    """A tool of the request's."""

    name: str
    description: str | None
    parameters: _JsonObject | None
    strict: bool


class CustomToolEcho(Struct, frozen=True, kw_only=True, tag="custom", tag_field="type"):
    """A custom tool of the request's."""

    name: str
    description: str | None
    format: CustomInputFormat | None


class ForcedFunction(Struct, frozen=True, kw_only=True, tag="function", tag_field="type"):
    """The one function that is to be called."""

    name: str


class ForcedCustomTool(Struct, frozen=True, kw_only=True, tag="custom", tag_field="type"):
    """The one custom tool that is to be called."""

    name: str


class AllowedToolsEcho(Struct, frozen=True, kw_only=True, tag="allowed_tools", tag_field="type"):
    """The tools that may be called, as if there were no others."""

    mode: Literal["auto", "required"]
    tools: list[ForcedFunction | ForcedCustomTool]


ToolChoiceEcho: TypeAlias = (
    Literal["none", "auto", "required"] | ForcedFunction | ForcedCustomTool | AllowedToolsEcho
)


class ReasoningEcho(Struct, frozen=True, kw_only=True):
    """``reasoning`` of the request."""

    effort: str | None = None
    summary: str | None = None


class TextEcho(Struct, frozen=True, kw_only=True):
    """``text`` of the request."""

    format: TextFormat | JsonObjectFormat | SchemaTextFormat


class Response(Struct, frozen=True, kw_only=True):
    """A response, whole or as far as it has come.

    Attributes:
        created_at: Seconds since 1970.
        completed_at: Seconds since 1970; null unless it is completed.
        output: In the order in which the model wrote the items.
        tools: Those that the model was shown; what is left out of the request is left out here.
        usage: Null until the response has ended.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: ToolChoiceEcho
    tools: list[FunctionToolEcho | CustomToolEcho]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(Struct, frozen=True, kw_only=True):
    """Answer of ``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


ContentPart: TypeAlias = OutputText | ReasoningText


class _Event(Struct, frozen=True, kw_only=True, tag_field="type"):
    sequence_number: int


class _OfResponse(_Event, frozen=True, kw_only=True):
    response: Response


class ResponseCreated(_OfResponse, frozen=True, kw_only=True, tag="response.created"):
    """The first event."""


class ResponseInProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    """The second event."""


class ResponseCompleted(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    """The last event of a response that ended by itself."""


class ResponseIncomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    """The last event of a response that reached ``max_output_tokens``."""


class ResponseFailed(_OfResponse, frozen=True, kw_only=True, tag="response.failed"):
    """The last event of a response that could not go on."""


class _OfItem(_Event, frozen=True, kw_only=True):
    output_index: int


class OutputItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins, empty."""

    item: OutputItem


class OutputItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is whole, or as whole as it will be."""

    item: OutputItem


class _InItem(_OfItem, frozen=True, kw_only=True):
    item_id: str


class _InPart(_InItem, frozen=True, kw_only=True):
    content_index: int = 0


class ContentPartAdded(_InPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """An item's one part begins, empty."""

    part: ContentPart


class ContentPartDone(_InPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """An item's part is whole."""

    part: ContentPart


class OutputTextDelta(_InPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """Some of a message's text, with its log-probabilities if they were asked for."""

    delta: str
    logprobs: list[OutputTokenLogprob]


class OutputTextDone(_InPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All of a message's text."""

    text: str
    logprobs: list[OutputTokenLogprob]


class ReasoningTextDelta(_InPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """Some of the thoughts."""

    delta: str


class ReasoningTextDone(_InPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """All of the thoughts."""

    text: str


class ArgumentsDelta(
    _InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """Some of a call's arguments."""

    delta: str


class ArgumentsDone(
    _InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """All of a call's arguments."""

    name: str
    arguments: str


class CustomInputDelta(
    _InItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"
):
    """Some of a custom tool's input."""

    delta: str


class CustomInputDone(
    _InItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"
):
    """All of a custom tool's input."""

    input: str


ResponseEvent: TypeAlias = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ContentPartDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
