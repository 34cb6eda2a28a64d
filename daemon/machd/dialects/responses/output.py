"""The output items of one response as they come, and the events that tell of them.

A whole answer is made by the same hands as a stream, with the events thrown away, so that the two
cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from machd.dialects.responses.answer import ItemStatus, OutputItem, OutputTokenLogprob
from machd.dialects.responses.events import OutputItemDone
from machd.dialects.responses.growing import (
    EventFrames,
    GrowingCall,
    GrowingCustomCall,
    GrowingItem,
    GrowingMessage,
    GrowingThoughts,
)
from machd.serving.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    joined_pieces,
)


class ResponseOutput:
    """Turns pieces of the model's text into items. One item is open at a time, the last one."""

    def __init__(self, frames: EventFrames, *, custom_tools: frozenset[str] = frozenset()) -> None:
        """Start without items; calls of ``custom_tools`` are written as those of custom tools."""
        self._frames = frames
        self._custom_tools = custom_tools
        self._done: list[OutputItem] = []
        self._open: GrowingItem | None = None
        self._unsaid: list[OutputTokenLogprob] = []

    @property
    def items(self) -> list[OutputItem]:
        """The items that are done."""
        return list(self._done)

    def push(self, pieces: Sequence[OutputPiece], logprobs: Iterable[OutputTokenLogprob]) -> bytes:
        """Take in what came; gives the events.

        Args:
            pieces: In the order of the text.
            logprobs: Of all tokens that came with it. Those of thoughts, which have no place of
                their own, are listed with the text that follows.
        """
        self._unsaid += logprobs
        return b"".join(self._take(piece) for piece in joined_pieces(pieces))

    def finish(self, status: ItemStatus) -> bytes:
        """End the output; ``status`` is that of an item that is still open."""
        first = b"" if self._done or self._open else self._enter_message()
        if isinstance(self._open, GrowingMessage) and self._unsaid:
            first += self._say("")
        return first + self._close(status)

    def _take(self, piece: OutputPiece) -> bytes:
        match piece:
            case Reasoning(text):
                return self._think(text)
            case Content(text):
                return self._enter_message() + self._say(text)
            case ToolCallStart(_, call_id, name):
                closing = self._close("completed")
                kind = GrowingCustomCall if name in self._custom_tools else GrowingCall
                return closing + self._begin(kind(self._frames, len(self._done), call_id, name))
            case ToolCallArguments(_, text):
                assert isinstance(self._open, GrowingCall | GrowingCustomCall), (
                    "arguments follow a call's start"
                )
                return self._open.add(text)
            case ToolCallEnd():
                return self._close("completed", is_whole=True)

    def _think(self, text: str) -> bytes:
        opening = b""
        if not isinstance(self._open, GrowingThoughts):
            closing = self._close("completed")
            opening = closing + self._begin(GrowingThoughts(self._frames, len(self._done)))
        assert isinstance(self._open, GrowingThoughts), "it was opened right here"
        return opening + self._open.add(text)

    def _enter_message(self) -> bytes:
        if isinstance(self._open, GrowingMessage):
            return b""
        closing = self._close("completed")
        return closing + self._begin(GrowingMessage(self._frames, len(self._done)))

    def _say(self, text: str) -> bytes:
        assert isinstance(self._open, GrowingMessage), "text stands in a message"
        logprobs, self._unsaid = self._unsaid, []
        return self._open.add(text, logprobs)

    def _begin(self, item: GrowingItem) -> bytes:
        self._open = item
        return item.open()

    def _close(self, status: ItemStatus, *, is_whole: bool = False) -> bytes:
        """End the open item; a call without its end is incomplete, whatever ended it."""
        if self._open is None:
            return b""
        if isinstance(self._open, GrowingCall | GrowingCustomCall) and not is_whole:
            status = "incomplete"
        closing = self._open.close()
        item = self._open.item(status)
        done = OutputItemDone(
            sequence_number=self._frames.number(), output_index=self._open.index, item=item
        )
        self._done.append(item)
        self._open = None
        return closing + self._frames.frame(done)
