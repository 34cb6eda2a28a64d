"""What ``POST /v1/chat/completions`` answers, whole and in chunks."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from machd.api.logprobs import ChatLogprobs
from machd.api.usage import FinishReason, Usage

__all__ = [
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatDelta",
    "ChatResponseMessage",
]


class ChatResponseMessage(Struct, frozen=True, kw_only=True):
    """The message that the model wrote."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One of ``n`` answers; ``index`` counts from 0."""

    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A whole answer. ``created`` is in seconds since 1970."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None


class ChatDelta(Struct, frozen=True, kw_only=True):
    """What a chunk adds to the message: the role in the first one, nothing in the last one."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """One choice's share of a chunk; ``finish_reason`` is null until its last one."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream.

    Attributes:
        created: Seconds since 1970, the same in every chunk.
        usage: With ``stream_options.include_usage``: null, and the usage in the last chunk, which
            has no choices. Without it: not there at all.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
