"""The output items of a response as they grow, and the events that tell of them.

A whole answer is made by the same code as a stream, with the events thrown away, so that the two cannot differ.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import msgspec

from machd.dialects.responses import answer
from machd.dialects.responses.tools import custom_input
from machd.http.sse import event_frame
from machd.reading import output


class EventFrames:
    """Writes the events of one response and counts them."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._next_number = 0

    def frame(self, kind: Callable[..., answer.ResponseEvent], **fields: object) -> bytes:
        """Encode the next event; ``fields`` are those of ``kind`` but ``sequence_number``."""
        event = kind(sequence_number=self._next_number, **fields)
        self._next_number += 1
        return event_frame(str(event.__struct_config__.tag), self._encoder.encode(event))


class GrowingItem(ABC):
    """An output item with an id, an index and text."""

    prefix = ""

    def __init__(self, frames: EventFrames, index: int) -> None:
        self._frames = frames
        self.index = index
        self.id = f"{self.prefix}_{secrets.token_hex(14)}"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of the text so far."""
        return "".join(self._texts)

    @abstractmethod
    def open(self) -> bytes:
        """Frame the events that begin the item, which is empty."""

    @abstractmethod
    def close(self) -> bytes:
        """Frame the events that end the text; the item comes next."""

    @abstractmethod
    def item(self, status: answer.ItemStatus) -> answer.OutputItem:
        """Return the item with its text so far."""

    def _added(self, item: answer.OutputItem) -> bytes:
        return self._frames.frame(answer.OutputItemAdded, output_index=self.index, item=item)

    def _frame(self, kind: Callable[..., answer.ResponseEvent], **fields: object) -> bytes:
        return self._frames.frame(kind, output_index=self.index, item_id=self.id, **fields)


class GrowingMessage(GrowingItem):
    """A message with one part, its text."""

    prefix = "msg"

    def __init__(self, frames: EventFrames, index: int) -> None:
        super().__init__(frames, index)
        self._logprobs: list[answer.OutputTokenLogprob] = []

    def open(self) -> bytes:
        """Frame the empty item."""
        item = answer.MessageItem(id=self.id, status="in_progress", content=[])
        return self._added(item) + self._frame(
            answer.ContentPartAdded, part=answer.OutputText(text="")
        )

    def add(self, text: str, logprobs: list[answer.OutputTokenLogprob]) -> bytes:
        """Append text."""
        self._texts.append(text)
        self._logprobs += logprobs
        return self._frame(answer.OutputTextDelta, delta=text, logprobs=logprobs)

    def close(self) -> bytes:
        """Frame the whole text."""
        done = self._frame(answer.OutputTextDone, text=self.text, logprobs=self._logprobs)
        return done + self._frame(answer.ContentPartDone, part=self._part())

    def item(self, status: answer.ItemStatus) -> answer.MessageItem:
        """Return the item with its text so far."""
        return answer.MessageItem(id=self.id, status=status, content=[self._part()])

    def _part(self) -> answer.OutputText:
        return answer.OutputText(text=self.text, logprobs=self._logprobs)


class GrowingThoughts(GrowingItem):
    """Thoughts with one part, their text."""

    prefix = "rs"

    def open(self) -> bytes:
        """Frame the empty item."""
        item = answer.ReasoningItem(id=self.id, status="in_progress", content=[])
        return self._added(item) + self._frame(
            answer.ContentPartAdded, part=answer.ReasoningText(text="")
        )

    def add(self, text: str) -> bytes:
        """Append text."""
        self._texts.append(text)
        return self._frame(answer.ReasoningTextDelta, delta=text)

    def close(self) -> bytes:
        """Frame the whole text."""
        done = self._frame(answer.ReasoningTextDone, text=self.text)
        return done + self._frame(answer.ContentPartDone, part=answer.ReasoningText(text=self.text))

    def item(self, status: answer.ItemStatus) -> answer.ReasoningItem:
        """Return the item with its text so far."""
        return answer.ReasoningItem(
            id=self.id, status=status, content=[answer.ReasoningText(text=self.text)]
        )


class GrowingCall(GrowingItem):
    """A call of a function, with arguments in place of parts."""

    prefix = "fc"

    def __init__(self, frames: EventFrames, index: int, call_id: str, name: str) -> None:
        super().__init__(frames, index)
        self._call_id = call_id
        self._name = name

    def open(self) -> bytes:
        """Frame the empty item."""
        return self._added(self.item("in_progress"))

    def add(self, text: str) -> bytes:
        """Append to the arguments."""
        self._texts.append(text)
        return self._frame(answer.ArgumentsDelta, delta=text)

    def close(self) -> bytes:
        """Frame the whole text."""
        return self._frame(answer.ArgumentsDone, name=self._name, arguments=self.text)

    def item(self, status: answer.ItemStatus) -> answer.OutputItem:
        """Return the item with its text so far."""
        return answer.FunctionCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            arguments=self.text,
            status=status,
        )


class GrowingCustomCall(GrowingCall):
    """A custom tool's call: its arguments are JSON around the input, known when that is whole."""

    prefix = "ctc"

    def add(self, text: str) -> bytes:
        """Append to the JSON around the input; no event yet."""
        self._texts.append(text)
        return b""

    def close(self) -> bytes:
        """Frame the whole text."""
        text = custom_input(self.text)
        return self._frame(answer.CustomInputDelta, delta=text) + self._frame(
            answer.CustomInputDone, input=text
        )

    def item(self, status: answer.ItemStatus) -> answer.OutputItem:
        """Return the item with its text so far."""
        return answer.CustomToolCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            input=custom_input(self.text),
            status=status,
        )


class ResponseOutput:
    """Turns pieces of the model's text into items. One item is open at a time, the last one."""

    def __init__(self, frames: EventFrames, *, custom_tools: frozenset[str] = frozenset()) -> None:
        """Start without items; calls of ``custom_tools`` are written as those of custom tools."""
        self._frames = frames
        self._custom_tools = custom_tools
        self._done: list[answer.OutputItem] = []
        self._open: GrowingItem | None = None
        self._unsaid: list[answer.OutputTokenLogprob] = []

    @property
    def items(self) -> list[answer.OutputItem]:
        """The items that are done."""
        return list(self._done)

    def push(
        self, pieces: Sequence[output.OutputPiece], logprobs: Iterable[answer.OutputTokenLogprob]
    ) -> bytes:
        """Append pieces in the order of the text; returns the events.

        ``logprobs`` are of all tokens that came with them. Those of thoughts, which have no place of
        their own, are listed with the text that follows.
        """
        self._unsaid += logprobs
        return b"".join(self._take(piece) for piece in output.joined_pieces(pieces))

    def finish(self, status: answer.ItemStatus) -> bytes:
        """End the output; ``status`` is that of an item that is still open."""
        first = b"" if self._done or self._open else self._enter_message()
        if isinstance(self._open, GrowingMessage) and self._unsaid:
            first += self._say("")
        return first + self._close(status)

    def _take(self, piece: output.OutputPiece) -> bytes:
        match piece:
            case output.Reasoning(text):
                return self._think(text)
            case output.Content(text):
                return self._enter_message() + self._say(text)
            case output.ToolCallStart(_, call_id, name):
                closing = self._close("completed")
                kind = GrowingCustomCall if name in self._custom_tools else GrowingCall
                return closing + self._begin(kind(self._frames, len(self._done), call_id, name))
            case output.ToolCallArguments(_, text):
                assert isinstance(self._open, GrowingCall), "arguments follow a call's start"
                return self._open.add(text)
            case output.ToolCallEnd():
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

    def _close(self, status: answer.ItemStatus, *, is_whole: bool = False) -> bytes:
        """End the open item; a call without its end is incomplete, whatever ended it."""
        if self._open is None:
            return b""
        if isinstance(self._open, GrowingCall) and not is_whole:
            status = "incomplete"
        closing = self._open.close()
        item = self._open.item(status)
        done = self._frames.frame(answer.OutputItemDone, output_index=self._open.index, item=item)
        self._done.append(item)
        self._open = None
        return closing + done
