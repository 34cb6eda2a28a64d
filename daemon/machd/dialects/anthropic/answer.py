"""Answers of ``POST /v1/messages``, whole and in events, and of counting."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from machd.dialects.usage import CacheDiagnosisDetails

StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
"""Why an answer ended."""


class MessageUsage(Struct, frozen=True, kw_only=True):
    """Tokens of a request.

    Attributes:
        input_tokens: Of the prompt, without those that came from the prefix cache.
        cache_creation_input_tokens: Zero; what machd keeps is not asked for or paid for.
        cache_read_input_tokens: Of the prompt, taken from the prefix cache.
        output_tokens: Of the answer, thoughts included.
        cache_diagnosis: An extension: why the cache had no more of the prompt, where asked for.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    cache_diagnosis: CacheDiagnosisDetails | UnsetType = UNSET


class _Changed(Struct, frozen=True, kw_only=True, tag_field="type"):
    """A request differs from the earlier one.

    Attributes:
        cache_missed_input_tokens: Tokens of the earlier prompt that were not found in the cache.
    """

    cache_missed_input_tokens: int


class ModelChanged(_Changed, frozen=True, kw_only=True, tag="model_changed"):
    """Another model, or another adapter."""


class SystemChanged(_Changed, frozen=True, kw_only=True, tag="system_changed"):
    """Another ``system``."""


class ToolsChanged(_Changed, frozen=True, kw_only=True, tag="tools_changed"):
    """Other ``tools``, or the same in another order."""


class MessagesChanged(_Changed, frozen=True, kw_only=True, tag="messages_changed"):
    """An earlier message was changed or left out."""


class PreviousMessageNotFound(
    Struct, frozen=True, tag="previous_message_not_found", tag_field="type"
):
    """No request with this answer is kept: it asked for no ``diagnostics``, is too old, or of another client or run."""


class Unavailable(Struct, frozen=True, tag="unavailable", tag_field="type"):
    """``thinking``, ``tool_choice`` or ``output_config`` differ."""


CacheMissReason: TypeAlias = (
    ModelChanged
    | SystemChanged
    | ToolsChanged
    | MessagesChanged
    | PreviousMessageNotFound
    | Unavailable
)
"""Where a request differs from an earlier one."""


class Diagnostics(Struct, frozen=True, kw_only=True):
    """Why the cache had less of the prompt than it had of an earlier one."""

    cache_miss_reason: CacheMissReason


class AnswerText(Struct, frozen=True, kw_only=True, tag="text", tag_field="type"):
    """Some of the answer's text."""

    text: str


class AnswerThinking(Struct, frozen=True, kw_only=True, tag="thinking", tag_field="type"):
    """The model's thoughts. Clients want a signature; machd signs nothing."""

    thinking: str
    signature: str = ""


class AnswerToolUse(Struct, frozen=True, kw_only=True, tag="tool_use", tag_field="type"):
    """A call that the client is asked to make.

    Attributes:
        input: The arguments, an object; empty where ``max_tokens`` cut them short.
    """

    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


AnswerBlock: TypeAlias = AnswerText | AnswerThinking | AnswerToolUse


class Message(Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    """An answer; at the start of a stream, one without content.

    Attributes:
        stop_reason: Null at the start of a stream.
        stop_sequence: The stop sequence that ended the answer, if one did.
        diagnostics: Left out unless asked for; null where the request goes on behind the earlier one.
    """

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    diagnostics: Diagnostics | UnsetType | None = UNSET


class TokenCount(Struct, frozen=True, kw_only=True):
    """Number of tokens in a conversation's prompt."""

    input_tokens: int


class MessageStartEvent(Struct, frozen=True, kw_only=True, tag="message_start", tag_field="type"):
    """The first event."""

    message: Message


class PingEvent(Struct, frozen=True, tag="ping", tag_field="type"):
    """No news."""


class BlockStartEvent(
    Struct, frozen=True, kw_only=True, tag="content_block_start", tag_field="type"
):
    """A block begins; indices count from 0, and blocks never interleave."""

    index: int
    content_block: AnswerBlock


class TextDelta(Struct, frozen=True, kw_only=True, tag="text_delta", tag_field="type"):
    """More text."""

    text: str


class ThinkingDelta(Struct, frozen=True, kw_only=True, tag="thinking_delta", tag_field="type"):
    """More of a thought."""

    thinking: str


class SignatureDelta(Struct, frozen=True, kw_only=True, tag="signature_delta", tag_field="type"):
    """The signature, which ends every thought."""

    signature: str = ""


class InputJsonDelta(Struct, frozen=True, kw_only=True, tag="input_json_delta", tag_field="type"):
    """More of the JSON text of a call's input."""

    partial_json: str


BlockDelta: TypeAlias = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockDeltaEvent(
    Struct, frozen=True, kw_only=True, tag="content_block_delta", tag_field="type"
):
    """A block grows."""

    index: int
    delta: BlockDelta


class BlockStopEvent(Struct, frozen=True, kw_only=True, tag="content_block_stop", tag_field="type"):
    """A block is whole."""

    index: int


class MessageDelta(Struct, frozen=True, kw_only=True):
    """The reason for the end of the answer."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDeltaEvent(Struct, frozen=True, kw_only=True, tag="message_delta", tag_field="type"):
    """The answer has ended; the usage is that of the whole request."""

    delta: MessageDelta
    usage: MessageUsage


class MessageStopEvent(Struct, frozen=True, tag="message_stop", tag_field="type"):
    """The last event."""


StreamEvent: TypeAlias = (
    MessageStartEvent
    | PingEvent
    | BlockStartEvent
    | BlockDeltaEvent
    | BlockStopEvent
    | MessageDeltaEvent
    | MessageStopEvent
)
"""An event's data; its ``type`` is the event's name."""
