"""Calls as OpenAI's chat completions had them before tools: one ``function_call`` in a message."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from machd.dialects.chat.answer import ChatDelta, ChatFinishReason, ChatResponseMessage


def legacy_message(message: ChatResponseMessage) -> ChatResponseMessage:
    """The message with its one call in ``function_call``."""
    if not message.tool_calls:
        return message
    call = message.tool_calls[0]
    return msgspec.structs.replace(message, tool_calls=UNSET, function_call=call.function)


def legacy_delta(delta: ChatDelta) -> ChatDelta:
    """The delta with what it adds to the call in ``function_call``."""
    if not delta.tool_calls:
        return delta
    call = delta.tool_calls[0]
    return msgspec.structs.replace(delta, tool_calls=UNSET, function_call=call.function)


def legacy_finish_reason(reason: ChatFinishReason | None) -> ChatFinishReason | None:
    """The finish reason in the words of that time."""
    return "function_call" if reason == "tool_calls" else reason
