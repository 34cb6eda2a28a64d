"""Answers of ``POST /v1/chat/completions``, whole and in chunks, made of pieces of output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from machd.dialects.chat.messages import gap_between
from machd.dialects.logprobs import ChatLogprobs, PromptTokenLogprobs
from machd.dialects.usage import FinishReason, Usage, wire_finish_reason
from machd.dialects.wire.generation_request import UsedTier
from machd.generations.generation import TOOL_CALLS
from machd.reading.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

ChatFinishReason: TypeAlias = FinishReason | Literal["tool_calls", "function_call"]
"""``tool_calls``: the answer ended by itself and called something; ``function_call`` says the same where
the request has ``functions``."""


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
    """Answer of ``DELETE /v1/chat/completions/{id}``."""

    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: Literal[True] = True


class CallFunctionDelta(Struct, frozen=True, kw_only=True):
    """The name, once, and what comes next of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class CallDelta(Struct, frozen=True, kw_only=True):
    """A chunk's addition to one call; ``id``, ``type`` and the name come with the first.

    Attributes:
        index: Counts the calls of a message from 0.
    """

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CallFunctionDelta


class ChatDelta(Struct, frozen=True, kw_only=True):
    """A chunk's addition to the message: the role in the first one, nothing in the last one.

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


class ContentGaps:
    """Keeps the texts of one choice apart that had a call between them.

    Chat completions join them, and calls come without the white space around them.
    """

    def __init__(self) -> None:
        """Begin where nothing has been said."""
        self._said = ""
        self._is_after_call = False

    def filled(self, pieces: Iterable[OutputPiece]) -> list[OutputPiece]:
        """The next pieces, with a gap before a text that goes on after a call."""
        return [self._filled(piece) for piece in pieces]

    def _filled(self, piece: OutputPiece) -> OutputPiece:
        if isinstance(piece, ToolCallStart):
            self._is_after_call = True
        if not isinstance(piece, Content):
            return piece
        gap = gap_between(self._said, piece.text) if self._is_after_call else ""
        self._said, self._is_after_call = piece.text, False
        return Content(gap + piece.text)


def chat_message(pieces: Sequence[OutputPiece]) -> ChatResponseMessage:
    """A whole message. Its content is null where there are calls and no text."""
    pieces = ContentGaps().filled(pieces)
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) or UNSET
    calls = _tool_calls(pieces)
    return ChatResponseMessage(
        content=None if calls and not content else content,
        reasoning_content=thoughts,
        reasoning=thoughts,
        tool_calls=calls or UNSET,
    )


def chat_deltas(pieces: Iterable[OutputPiece]) -> list[ChatDelta]:
    """Return the next deltas of a message, in order; none is empty.

    A delta holds thoughts, text or one call, because clients look at one of them in each chunk.
    Pieces come from the choice's :class:`ContentGaps`.
    """
    runs: list[list[OutputPiece]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallEnd):
            continue
        if runs and _kind(runs[-1][0]) == _kind(piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_delta(run) for run in runs]


def _kind(piece: OutputPiece) -> tuple[type[OutputPiece], int]:
    """Return the key of a run: its kind, and its call."""
    if isinstance(piece, Reasoning | Content):
        return type(piece), 0
    return ToolCallStart, piece.index


def _delta(run: Sequence[OutputPiece]) -> ChatDelta:
    text = "".join(
        piece.text for piece in run if not isinstance(piece, ToolCallStart | ToolCallEnd)
    )
    match run[0]:
        case Reasoning():
            return ChatDelta(reasoning_content=text, reasoning=text)
        case Content():
            return ChatDelta(content=text)
        case ToolCallStart(index=index, call_id=call_id, name=name):
            function = CallFunctionDelta(name=name, arguments=text)
            return ChatDelta(
                tool_calls=[CallDelta(index=index, id=call_id, type="function", function=function)]
            )
        case ToolCallArguments(index=index) | ToolCallEnd(index=index):
            function = CallFunctionDelta(arguments=text)
            return ChatDelta(tool_calls=[CallDelta(index=index, function=function)])


def _tool_calls(pieces: Sequence[OutputPiece]) -> list[ToolCall]:
    starts = [piece for piece in pieces if isinstance(piece, ToolCallStart)]
    arguments = {start.index: "" for start in starts}
    for piece in pieces:
        if isinstance(piece, ToolCallArguments):
            arguments[piece.index] += piece.text
    return [
        ToolCall(
            id=start.call_id,
            function=CallFunction(name=start.name, arguments=arguments[start.index]),
        )
        for start in starts
    ]


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


def chat_finish_reason(reason: str | None) -> ChatFinishReason | None:
    """Return the finish reason of a choice, which may end with calls; None while it goes on."""
    return "tool_calls" if reason == TOOL_CALLS else wire_finish_reason(reason)
