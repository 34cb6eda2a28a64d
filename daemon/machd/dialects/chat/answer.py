"""Answers of ``POST /v1/chat/completions``, whole and in chunks, both grown from pieces of output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from machd.dialects.chat.messages import gap_between
from machd.dialects.logprobs import ChatLogprobs, GrowingLogprobs, PromptTokenLogprobs
from machd.dialects.prompt_progress import PromptProgress
from machd.dialects.usage import FinishReason, Usage, wire_finish_reason
from machd.dialects.wire.generation_request import UsedTier
from machd.engine.protocol.tokenizer import Tokenizer
from machd.generations.generation import TOOL_CALLS, ChoiceDelta
from machd.reading import output

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
        prompt_progress: With ``return_progress``, in chunks that add nothing to the message.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    service_tier: UsedTier | UnsetType = UNSET
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class ContentGaps:
    """Keeps the texts of one choice apart that had a call between them.

    Chat completions join them, and calls come without the white space around them.
    """

    def __init__(self) -> None:
        self._said = ""
        self._is_after_call = False

    def push(self, pieces: Iterable[output.OutputPiece]) -> list[output.OutputPiece]:
        """The next pieces, with a gap before a text that goes on after a call."""
        return [self._filled(piece) for piece in pieces]

    def _filled(self, piece: output.OutputPiece) -> output.OutputPiece:
        if isinstance(piece, output.ToolCallStart):
            self._is_after_call = True
        if not isinstance(piece, output.Content):
            return piece
        gap = gap_between(self._said, piece.text) if self._is_after_call else ""
        self._said, self._is_after_call = piece.text, False
        return output.Content(gap + piece.text)


class GrowingMessage:
    """The message of one choice, which grows by the deltas that a stream tells."""

    def __init__(self, *, is_legacy: bool = False) -> None:
        """Begin without text; a legacy message has one call, in ``function_call``."""
        self._is_legacy = is_legacy
        self._gaps = ContentGaps()
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[output.ToolCallStart, list[str]]] = []

    def push(self, pieces: Iterable[output.OutputPiece]) -> list[ChatDelta]:
        """Append the next pieces; returns the deltas, in order, none of them empty.

        A delta holds thoughts, text or one call, because clients look at one of them in each chunk.
        """
        told = [one for one in self._gaps.push(pieces) if not isinstance(one, output.ToolCallEnd)]
        return [self._grow(list(run)) for _, run in groupby(told, _kind)]

    def finish(self) -> ChatResponseMessage:
        """Return the message. Its content is null where there are calls and no text."""
        content, thoughts = "".join(self._content), "".join(self._thoughts) or UNSET
        calls = [
            ToolCall(
                id=start.call_id,
                function=CallFunction(name=start.name, arguments="".join(arguments)),
            )
            for start, arguments in self._calls
        ]
        return ChatResponseMessage(
            content=None if calls and not content else content,
            reasoning_content=thoughts,
            reasoning=thoughts,
            tool_calls=UNSET if self._is_legacy or not calls else calls,
            function_call=calls[0].function if self._is_legacy and calls else UNSET,
        )

    def _grow(self, run: Sequence[output.OutputPiece]) -> ChatDelta:
        text = "".join(
            piece.text
            for piece in run
            if not isinstance(piece, output.ToolCallStart | output.ToolCallEnd)
        )
        match run[0]:
            case output.Reasoning():
                self._thoughts.append(text)
                return ChatDelta(reasoning_content=text, reasoning=text)
            case output.Content():
                self._content.append(text)
                return ChatDelta(content=text)
            case output.ToolCallStart(index, call_id, name) as start:
                self._calls.append((start, [text]))
                function = CallFunctionDelta(name=name, arguments=text)
                return self._called(
                    CallDelta(index=index, id=call_id, type="function", function=function)
                )
            case output.ToolCallArguments(index) | output.ToolCallEnd(index):
                self._calls[index][1].append(text)
                function = CallFunctionDelta(arguments=text)
                return self._called(CallDelta(index=index, function=function))

    def _called(self, call: CallDelta) -> ChatDelta:
        if self._is_legacy:
            return ChatDelta(function_call=call.function)
        return ChatDelta(tool_calls=[call])


def _kind(piece: output.OutputPiece) -> tuple[type[output.OutputPiece], int]:
    """Return the key of a run: its kind, and its call."""
    if isinstance(piece, output.Reasoning | output.Content):
        return type(piece), 0
    return output.ToolCallStart, piece.index


class GrowingChoice:
    """One choice of a chat completion, which grows by the chunks that a stream tells."""

    def __init__(self, index: int, *, is_legacy: bool, logprobs_from: Tokenizer | None) -> None:
        """Begin a choice; ``logprobs_from`` is None where no log-probabilities are wanted."""
        self._index = index
        self._is_legacy = is_legacy
        self._has_logprobs = logprobs_from is not None
        self._logprobs = GrowingLogprobs(logprobs_from)
        self._message = GrowingMessage(is_legacy=is_legacy)
        self._finish_reason: ChatFinishReason | None = None

    def push(self, delta: ChoiceDelta) -> list[ChatChunkChoice]:
        """Append what came; returns its chunks."""
        self._logprobs.push(delta.tokens)
        self._finish_reason = self._reason(delta.finish_reason)
        deltas = self._message.push(delta.pieces)
        if not deltas and self._finish_reason is not None:
            deltas = [ChatDelta()]
        last = len(deltas) - 1
        return [
            ChatChunkChoice(
                index=self._index,
                delta=one,
                logprobs=ChatLogprobs(content=new) if (new := self._logprobs.unframed()) else None,
                finish_reason=self._finish_reason if position == last else None,
            )
            for position, one in enumerate(deltas)
        ]

    def finish(self) -> ChatChoice:
        """Return the whole choice."""
        logprobs = ChatLogprobs(content=self._logprobs.finish()) if self._has_logprobs else None
        return ChatChoice(
            index=self._index,
            message=self._message.finish(),
            logprobs=logprobs,
            finish_reason=self._finish_reason or "stop",
        )

    def _reason(self, reason: str | None) -> ChatFinishReason | None:
        if reason == TOOL_CALLS:
            return "function_call" if self._is_legacy else "tool_calls"
        return wire_finish_reason(reason)
