"""Usage and finish reasons as the wire spells them."""

from __future__ import annotations

from machd.dialects.chat.answer import ChatFinishReason
from machd.dialects.usage_wire import FinishReason, Usage
from machd.serving.generation import TOOL_CALLS, GenerationUsage


def wire_usage(usage: GenerationUsage) -> Usage:
    """Tokens of a generation."""
    return Usage.of(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def wire_finish_reason(reason: str | None) -> FinishReason | None:
    """Of a choice that ended well; None while it goes on."""
    match reason:
        case None:
            return None
        case "length":
            return "length"
        case _:
            return "stop"


def chat_finish_reason(reason: str | None) -> ChatFinishReason | None:
    """Of a chat completion's choice, which may end with calls; None while it goes on."""
    return "tool_calls" if reason == TOOL_CALLS else wire_finish_reason(reason)
