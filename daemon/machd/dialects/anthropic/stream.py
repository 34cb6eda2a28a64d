"""A generation as Anthropic's message, whole or as a stream of events over blocks of content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from machd.dialects.anthropic.answer import (
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    BlockDelta,
    BlockDeltaEvent,
    BlockStartEvent,
    BlockStopEvent,
    InputJsonDelta,
    Message,
    MessageDelta,
    MessageDeltaEvent,
    MessageStartEvent,
    MessageStopEvent,
    MessageUsage,
    PingEvent,
    SignatureDelta,
    StopReason,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
)
from machd.dialects.anthropic.errors import anthropic_error_json
from machd.errors import MachdError
from machd.generations.generation import (
    TOOL_CALLS,
    ChoiceDelta,
    GenerationIdentity,
    GenerationUsage,
)
from machd.http.sse import EVENT_STREAM, event_frame
from machd.reading.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

_NO_INPUT = Raw(b"{}")


class BlockEvents:
    """Pieces as the events of blocks, one block after the other."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        """Begin without a block; where thoughts are not told, an empty block stands for them."""
        self._shows_thoughts = shows_thoughts
        self._index = -1
        self._open: type[AnswerBlock] | None = None

    def read(self, pieces: Iterable[OutputPiece]) -> Iterator[StreamEvent]:
        """Extend the blocks by new pieces; yields the events."""
        for piece in pieces:
            if isinstance(piece, ToolCallEnd):
                yield from self.finish()
                continue
            if (block := self._opened_by(piece)) is not None:
                yield from self._start(block)
            if (delta := self._grown_by(piece)) is not None:
                yield BlockDeltaEvent(index=self._index, delta=delta)

    def finish(self) -> Iterator[StreamEvent]:
        """End the block that is open, if one is."""
        if self._open is AnswerThinking:
            yield BlockDeltaEvent(index=self._index, delta=SignatureDelta())
        if self._open is not None:
            yield BlockStopEvent(index=self._index)
        self._open = None

    def _start(self, block: AnswerBlock) -> Iterator[StreamEvent]:
        yield from self.finish()
        self._index += 1
        self._open = type(block)
        yield BlockStartEvent(index=self._index, content_block=block)

    def _opened_by(self, piece: OutputPiece) -> AnswerBlock | None:
        """The block that has to be there first, if it is not open."""
        match piece:
            case Reasoning() if self._open is not AnswerThinking:
                return AnswerThinking(thinking="")
            case Content() if self._open is not AnswerText:
                return AnswerText(text="")
            case ToolCallStart(_, call_id, name):
                return AnswerToolUse(id=_tool_use_id(call_id), name=name, input=_NO_INPUT)
            case _:
                return None

    def _grown_by(self, piece: OutputPiece) -> BlockDelta | None:
        match piece:
            case Reasoning(text) if self._shows_thoughts:
                return ThinkingDelta(thinking=text)
            case Content(text):
                return TextDelta(text=text)
            case ToolCallArguments(_, text):
                return InputJsonDelta(partial_json=text)
            case _:
                return None


@dataclass(slots=True)
class _WholeBlock:
    """Pieces of one block; ``start`` is the first of them, the rest have texts."""

    start: OutputPiece
    texts: list[str]

    def on_wire(self, *, shows_thoughts: bool) -> AnswerBlock:
        text = "".join(self.texts)
        match self.start:
            case Reasoning():
                return AnswerThinking(thinking=text if shows_thoughts else "")
            case ToolCallStart(_, call_id, name):
                return AnswerToolUse(id=_tool_use_id(call_id), name=name, input=_input(text))
            case _:
                return AnswerText(text=text)


def whole_blocks(pieces: Iterable[OutputPiece], *, shows_thoughts: bool) -> list[AnswerBlock]:
    """All pieces of an answer as its blocks."""
    blocks: list[_WholeBlock] = []
    for piece in pieces:
        match piece:
            case ToolCallStart():
                blocks.append(_WholeBlock(piece, []))
            case ToolCallArguments(_, text):
                blocks[-1].texts.append(text)
            case Reasoning(text) | Content(text):
                if not blocks or type(blocks[-1].start) is not type(piece):
                    blocks.append(_WholeBlock(piece, []))
                blocks[-1].texts.append(text)
            case ToolCallEnd():
                pass
    return [block.on_wire(shows_thoughts=shows_thoughts) for block in blocks]


def _input(text: str) -> Raw:
    """A call's arguments as the model wrote them, if that is an object."""
    try:
        msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        return _NO_INPUT  # max_tokens cut them short
    return Raw(text.encode())


def _tool_use_id(call_id: str) -> str:
    return f"toolu_{call_id.removeprefix('call_')}"


class AnthropicDialect:
    """Messages of one choice: Anthropic's API has no more."""

    media_type = EVENT_STREAM

    def __init__(
        self,
        identity: GenerationIdentity,
        model_id: str,
        *,
        shows_thoughts: bool,
    ) -> None:
        """Begin an answer.

        Args:
            identity: Whose answer it is.
            model_id: The served model.
            shows_thoughts: Whether thoughts are told; where not, an empty block stands for them.
        """
        self._identity = identity
        self._model_id = model_id
        self._shows_thoughts = shows_thoughts
        self._encoder = msgspec.json.Encoder()
        self._blocks = BlockEvents(shows_thoughts=shows_thoughts)
        self._ending = MessageDelta(stop_reason="end_turn", stop_sequence=None)
        self.keep_alive = self._frame(PingEvent())

    def opening(self, usage: GenerationUsage) -> bytes:
        """The message without content, but with the prompt's tokens, and a ping, as Anthropic does."""
        begun = msgspec.structs.replace(_usage(usage), output_tokens=0)
        return self._frame(MessageStartEvent(message=self._message([], None, begun))) + (
            self.keep_alive
        )

    def event(self, delta: ChoiceDelta) -> bytes:
        """Blocks that begin, grow and end."""
        events = list(self._blocks.read(delta.pieces))
        if delta.finish_reason is not None:
            events += self._blocks.finish()
            self._ending = _ending(delta)
        return self._frames(events)

    def closing(self, usage: GenerationUsage) -> bytes:
        """Write the end of the message and its reason."""
        return self._frames(
            [MessageDeltaEvent(delta=self._ending, usage=_usage(usage)), MessageStopEvent()]
        )

    def failure(self, error: MachdError) -> bytes:
        """An event of its own, which ends the stream."""
        return event_frame(
            "error", anthropic_error_json(error, request_id=self._identity.request_id)
        )

    def whole(self, deltas: Sequence[ChoiceDelta], usage: GenerationUsage) -> bytes:
        """The message."""
        (delta,) = deltas
        blocks = whole_blocks(delta.pieces, shows_thoughts=self._shows_thoughts)
        return self._encoder.encode(self._message(blocks, _ending(delta), _usage(usage)))

    def _message(
        self, content: list[AnswerBlock], ending: MessageDelta | None, usage: MessageUsage
    ) -> Message:
        return Message(
            id=self._identity.generation_id,
            model=self._model_id,
            content=content,
            stop_reason=ending.stop_reason if ending else None,
            stop_sequence=ending.stop_sequence if ending else None,
            usage=usage,
        )

    def _frames(self, events: Iterable[StreamEvent]) -> bytes:
        return b"".join(self._frame(event) for event in events)

    def _frame(self, event: StreamEvent) -> bytes:
        return event_frame(str(event.__struct_config__.tag), self._encoder.encode(event))


def _ending(delta: ChoiceDelta) -> MessageDelta:
    return MessageDelta(
        stop_reason=_stop_reason(delta),
        stop_sequence=delta.stop if _stop_reason(delta) == "stop_sequence" else None,
    )


def _stop_reason(delta: ChoiceDelta) -> StopReason:
    if delta.finish_reason == TOOL_CALLS:
        return "tool_use"
    if delta.finish_reason == "length":
        return "max_tokens"
    return "end_turn" if delta.stop is None else "stop_sequence"


def _usage(usage: GenerationUsage) -> MessageUsage:
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )
