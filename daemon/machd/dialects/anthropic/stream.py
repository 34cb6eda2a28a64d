"""A generation as Anthropic's message, whole or as a stream of events over blocks of content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import UNSET, Raw

from machd.dialects.anthropic import answer
from machd.dialects.anthropic.diagnostics import Comparison
from machd.dialects.anthropic.errors import anthropic_error_json
from machd.dialects.usage import CacheDiagnosisDetails
from machd.errors import MachdError
from machd.generations.choice import TOOL_CALLS, ChoiceDelta
from machd.generations.generation import GenerationUsage
from machd.generations.identity import GenerationIdentity
from machd.http.sse import EVENT_STREAM, event_frame
from machd.reading import output

_NO_INPUT = Raw(b"{}")


class GrowingBlocks:
    """The blocks of an answer, one after the other, which grow by the events of a stream."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        """Begin without a block; where thoughts are not told, an empty block stands for them."""
        self._shows_thoughts = shows_thoughts
        self._blocks: list[answer.AnswerBlock] = []
        self._open: answer.AnswerBlock | None = None
        self._texts: list[str] = []

    def push(self, pieces: Iterable[output.OutputPiece]) -> Iterator[answer.StreamEvent]:
        """Extend the blocks by new pieces; yields the events."""
        for piece in pieces:
            if isinstance(piece, output.ToolCallEnd):
                yield from self.close()
                continue
            if (block := self._opened_by(piece)) is not None:
                yield from self.close()
                self._open = block
                yield answer.BlockStartEvent(index=len(self._blocks), content_block=block)
            if (delta := self._grown_by(piece)) is not None:
                yield answer.BlockDeltaEvent(index=len(self._blocks), delta=delta)

    def close(self) -> Iterator[answer.StreamEvent]:
        """End the block that is open, if one is."""
        if self._open is None:
            return
        index, text = len(self._blocks), "".join(self._texts)
        match self._open:
            case answer.AnswerThinking():
                yield answer.BlockDeltaEvent(index=index, delta=answer.SignatureDelta())
                self._blocks.append(answer.AnswerThinking(thinking=text))
            case answer.AnswerText():
                self._blocks.append(answer.AnswerText(text=text))
            case answer.AnswerToolUse() as call:
                self._blocks.append(msgspec.structs.replace(call, input=_input(text)))
        self._open, self._texts = None, []
        yield answer.BlockStopEvent(index=index)

    def finish(self) -> list[answer.AnswerBlock]:
        """Return the blocks, which are all closed."""
        return self._blocks

    def _opened_by(self, piece: output.OutputPiece) -> answer.AnswerBlock | None:
        """The block that has to be there first, if it is not open."""
        match piece:
            case output.Reasoning() if not isinstance(self._open, answer.AnswerThinking):
                return answer.AnswerThinking(thinking="")
            case output.Content() if not isinstance(self._open, answer.AnswerText):
                return answer.AnswerText(text="")
            case output.ToolCallStart(_, call_id, name):
                return answer.AnswerToolUse(id=_tool_use_id(call_id), name=name, input=_NO_INPUT)
            case _:
                return None

    def _grown_by(self, piece: output.OutputPiece) -> answer.BlockDelta | None:
        match piece:
            case output.Reasoning(text) if self._shows_thoughts:
                self._texts.append(text)
                return answer.ThinkingDelta(thinking=text)
            case output.Content(text):
                self._texts.append(text)
                return answer.TextDelta(text=text)
            case output.ToolCallArguments(_, text):
                self._texts.append(text)
                return answer.InputJsonDelta(partial_json=text)
            case _:
                return None


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
        tells_cache: bool = False,
        comparison: Comparison | None = None,
    ) -> None:
        """Begin an answer.

        Where thoughts are not told, an empty block stands for them. With ``tells_cache`` the usage has the cache's
        diagnosis.
        """
        self._tells_cache = tells_cache
        self._comparison = comparison
        self._identity = identity
        self._model_id = model_id
        self._encoder = msgspec.json.Encoder()
        self._blocks = GrowingBlocks(shows_thoughts=shows_thoughts)
        self._ending = answer.MessageDelta(stop_reason="end_turn", stop_sequence=None)
        self.keep_alive = self._frame(answer.PingEvent())

    def opening(self, usage: GenerationUsage) -> bytes:
        """The message without content, but with the prompt's tokens, and a ping, as Anthropic does."""
        message = self._message([], None, usage)
        begun = msgspec.structs.replace(message.usage, output_tokens=0)
        message = msgspec.structs.replace(message, usage=begun)
        return self._frame(answer.MessageStartEvent(message=message)) + self.keep_alive

    def push(self, delta: ChoiceDelta) -> bytes:
        """Blocks that begin, grow and end."""
        events = list(self._blocks.push(delta.pieces))
        if delta.finish_reason is not None:
            events += self._blocks.close()
            self._ending = _ending(delta)
        return self._frames(events)

    def closing(self, usage: GenerationUsage) -> bytes:
        """Write the end of the message and its reason."""
        return self._frames(
            [
                answer.MessageDeltaEvent(delta=self._ending, usage=self._usage(usage)),
                answer.MessageStopEvent(),
            ]
        )

    def failure(self, error: MachdError) -> bytes:
        """An event of its own, which ends the stream."""
        return event_frame(
            "error", anthropic_error_json(error, request_id=self._identity.request_id)
        )

    def finish(self, usage: GenerationUsage) -> bytes:
        """The message."""
        return self._encoder.encode(self._message(self._blocks.finish(), self._ending, usage))

    def _message(
        self,
        content: list[answer.AnswerBlock],
        ending: answer.MessageDelta | None,
        usage: GenerationUsage,
    ) -> answer.Message:
        compared = self._comparison
        return answer.Message(
            id=self._identity.generation_id,
            model=self._model_id,
            content=content,
            stop_reason=ending.stop_reason if ending else None,
            stop_sequence=ending.stop_sequence if ending else None,
            usage=self._usage(usage),
            diagnostics=UNSET if compared is None else compared.diagnostics(usage),
        )

    def _usage(self, usage: GenerationUsage) -> answer.MessageUsage:
        return answer.MessageUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            cache_diagnosis=CacheDiagnosisDetails.of(usage, is_asked=self._tells_cache),
        )

    def _frames(self, events: Iterable[answer.StreamEvent]) -> bytes:
        return b"".join(self._frame(event) for event in events)

    def _frame(self, event: answer.StreamEvent) -> bytes:
        return event_frame(str(event.__struct_config__.tag), self._encoder.encode(event))


def _ending(delta: ChoiceDelta) -> answer.MessageDelta:
    return answer.MessageDelta(
        stop_reason=_stop_reason(delta),
        stop_sequence=delta.stop if _stop_reason(delta) == "stop_sequence" else None,
    )


def _stop_reason(delta: ChoiceDelta) -> answer.StopReason:
    if delta.finish_reason == TOOL_CALLS:
        return "tool_use"
    if delta.finish_reason == "length":
        return "max_tokens"
    return "end_turn" if delta.stop is None else "stop_sequence"
