"""Conversations of LM Studio's protocol as chat completions have them."""

from __future__ import annotations

from machd.dialects.lm_studio_socket.messages import (
    CallPart,
    CallResultPart,
    FilePart,
    History,
    HistoryMessage,
    TextPart,
)
from machd.errors import UnsupportedParameterError


def chat_messages(history: History) -> list[dict[str, object]]:
    """Return a conversation's messages; results of tools are one message each.

    Raises:
        UnsupportedParameterError: A message has a file.
    """
    return [one for message in history.messages for one in _chat_messages(message)]


def whole_text(history: History) -> str:
    """Return the texts of a conversation one after the other, for a text completion."""
    return "".join(_text(message) for message in history.messages)


def _chat_messages(message: HistoryMessage) -> list[dict[str, object]]:
    results: list[dict[str, object]] = [
        {"role": "tool", "content": part.content, "tool_call_id": part.tool_call_id or "call"}
        for part in message.content
        if isinstance(part, CallResultPart)
    ]
    if message.role == "tool":
        return results
    calls = [
        {
            "id": part.tool_call_request.id or "call",
            "type": "function",
            "function": {
                "name": part.tool_call_request.name,
                "arguments": bytes(part.tool_call_request.arguments).decode(),
            },
        }
        for part in message.content
        if isinstance(part, CallPart)
    ]
    told: dict[str, object] = {"role": message.role, "content": _text(message)}
    return [{**told, "tool_calls": calls} if calls else told]


def _text(message: HistoryMessage) -> str:
    if any(isinstance(part, FilePart) for part in message.content):
        raise UnsupportedParameterError.at(
            "history", "files and images by LM Studio's protocol are not served here"
        )
    return "".join(part.text for part in message.content if isinstance(part, TextPart))
