"""The events of a streamed response, in OpenAI's shapes.

Every event carries its name as ``type`` and a ``sequence_number`` that counts from 0. The order is:
``created``, ``in_progress``, then for each item ``output_item.added``, what the item gains, and
``output_item.done``, and at last ``completed``, ``incomplete`` or ``failed``.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from machd.dialects.responses.answer import (
    OutputItem,
    OutputText,
    OutputTokenLogprob,
    ReasoningText,
    Response,
)

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
