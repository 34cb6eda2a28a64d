"""A generation in Anthropic's words, whole and in events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from machd.dialects.anthropic.answer import (
    AnswerBlock,
    Message,
    MessageDelta,
    MessageDeltaEvent,
    MessageStartEvent,
    MessageStopEvent,
    MessageUsage,
    PingEvent,
    StopReason,
    StreamEvent,
)
from machd.dialects.anthropic.blocks import BlockEvents, whole_blocks
from machd.dialects.anthropic.errors import anthropic_error_json
from machd.errors import MachdError
from machd.http.sse import EVENT_STREAM, event_frame
from machd.serving.generation import (
    TOOL_CALLS,
    ChoiceDelta,
    GenerationIdentity,
    GenerationUsage,
)


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
        """How the message ended, and that it has."""
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
        """An event of its own, which ends the stream."""
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
