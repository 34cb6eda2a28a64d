"""What ``POST /v1/chat/completions`` answers, whole and in chunks."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from machd.dialects.logprobs_wire import ChatLogprobs, PromptTokenLogprobs
from machd.dialects.usage_wire import FinishReason, Usage

ChatFinishReason: TypeAlias = FinishReason | Literal["tool_calls", "function_call"]
"""``tool_calls``: the answer ended by itself and called something; ``function_call`` says the same where
the request has ``functions``."""

UsedTier: TypeAlias = Literal["default", "flex", "scale", "priority"]
"""The service tier that a request asked for; ``auto`` is ``default``."""


class CallFunction(Struct, frozen=True, kw_only=True):
    """A function that is to be called.

    Attributes:
        arguments: JSON text of an object; its beginning where ``max_tokens`` cut the call short.
    """

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call; ``id`` is what the tool's message has to name."""

    id: str
    type: Literal["function"] = "function"
    function: CallFunction


class ChatResponseMessage(Struct, frozen=True, kw_only=True):
    """The message that the model wrote.

    Attributes:
        content: Null where there are only calls.
        reasoning_content: What the model thought; left out where it did not.
        reasoning: The same, as other clients look for it.
        tool_calls: Left out where there are none.
        function_call: The call, where the request has ``functions``.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: CallFunction | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One of ``n`` answers; ``index`` counts from 0."""

    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A whole answer.

    Attributes:
        created: In seconds since 1970.
        service_tier: Left out where the request names none.
        metadata: The request's; left out where it has none.
        system_fingerprint: The same as long as model and software are.
        prompt_logprobs: Left out unless asked for.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: UsedTier | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    system_fingerprint: str | None = None
    prompt_logprobs: PromptTokenLogprobs | UnsetType = UNSET


class DeletedChatCompletion(Struct, frozen=True, kw_only=True):
    """What ``DELETE /v1/chat/completions/{id}`` answers."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Literal[True] = True


class CallFunctionDelta(Struct, frozen=True, kw_only=True):
    """The name, once, and what comes next of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(Struct, frozen=True, kw_only=True):
    """What a chunk adds to one call; ``id``, ``type`` and the name come with the first.

    Attributes:
        index: Counts the calls of a message from 0.
    """

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CallFunctionDelta


class ChatDelta(Struct, frozen=True, kw_only=True):
    """What a chunk adds to the message: the role in the first one, nothing in the last one.

    Attributes:
        tool_calls: One entry at most.
        function_call: The same, where the request has ``functions``.
    """

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    function_call: CallFunctionDelta | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """One choice's share of a chunk; ``finish_reason`` is null until its last one."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None


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
    service_tier: UsedTier | UnsetType = UNSET
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
