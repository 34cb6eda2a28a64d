"""One output item of a response while it grows, and the events that tell of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TypeAlias, TypedDict

import msgspec

from machd.dialects.responses.answer import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    CustomInputDelta,
    CustomInputDone,
    CustomToolCallItem,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputTokenLogprob,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
)
from machd.dialects.responses.tools import custom_input
from machd.http.sse import event_frame
from machd.serving.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    joined_pieces,
)


class EventFrames:
    """Writes events, and knows the number of the next one."""

    def __init__(self) -> None:
        """Start at 0."""
        self._encoder = msgspec.json.Encoder()
        self._next_number = 0

    def number(self) -> int:
        """The next ``sequence_number``; each is given out once."""
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def frame(self, event: ResponseEvent) -> bytes:
        """One event."""
        return event_frame(str(event.__struct_config__.tag), self._encoder.encode(event))


class _Place(TypedDict):
    """Fields of every event about one item."""

    sequence_number: int
    output_index: int
    item_id: str


class _Growing:
    """An item with an id, a place and text."""

    prefix = ""

    def __init__(self, frames: EventFrames, index: int) -> None:
        self._frames = frames
        self.index = index
        self.id = f"{self.prefix}_{secrets.token_hex(14)}"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def _place(self) -> _Place:
        """Return the fields of the next event."""
        return _Place(
            sequence_number=self._frames.number(), output_index=self.index, item_id=self.id
        )

    def _added(self, item: OutputItem) -> bytes:
        return self._frames.frame(
            OutputItemAdded(
                sequence_number=self._frames.number(), output_index=self.index, item=item
            )
        )

    def _part_added(self, part: OutputText | ReasoningText) -> bytes:
        return self._frames.frame(ContentPartAdded(**self._place(), part=part))

    def _part_done(self, part: OutputText | ReasoningText) -> bytes:
        return self._frames.frame(ContentPartDone(**self._place(), part=part))


class GrowingMessage(_Growing):
    """A message: one part, its text."""

    prefix = "msg"

    def __init__(self, frames: EventFrames, index: int) -> None:
        super().__init__(frames, index)
        self._logprobs: list[OutputTokenLogprob] = []

    def open(self) -> bytes:
        """The item begins, empty."""
        item = MessageItem(id=self.id, status="in_progress", content=[])
        return self._added(item) + self._part_added(OutputText(text=""))

    def add(self, text: str, logprobs: list[OutputTokenLogprob]) -> bytes:
        """Some more text."""
        self._texts.append(text)
        self._logprobs += logprobs
        return self._frames.frame(OutputTextDelta(**self._place(), delta=text, logprobs=logprobs))

    def close(self) -> bytes:
        """The text is whole; the item comes next."""
        done = OutputTextDone(**self._place(), text=self.text, logprobs=self._logprobs)
        return self._frames.frame(done) + self._part_done(self._part())

    def item(self, status: ItemStatus) -> MessageItem:
        """What it has become."""
        return MessageItem(id=self.id, status=status, content=[self._part()])

    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=self._logprobs)


class GrowingThoughts(_Growing):
    """Thoughts: one part, their text."""

    prefix = "rs"

    def open(self) -> bytes:
        """The item begins, empty."""
        item = ReasoningItem(id=self.id, status="in_progress", content=[])
        return self._added(item) + self._part_added(ReasoningText(text=""))

    def add(self, text: str) -> bytes:
        """Some more text."""
        self._texts.append(text)
        return self._frames.frame(ReasoningTextDelta(**self._place(), delta=text))

    def close(self) -> bytes:
        """The text is whole; the item comes next."""
        done = ReasoningTextDone(**self._place(), text=self.text)
        return self._frames.frame(done) + self._part_done(ReasoningText(text=self.text))

    def item(self, status: ItemStatus) -> ReasoningItem:
        """What it has become."""
        return ReasoningItem(id=self.id, status=status, content=[ReasoningText(text=self.text)])


class GrowingCall(_Growing):
    """A call: no parts, but arguments."""

    prefix = "fc"

    def __init__(self, frames: EventFrames, index: int, call_id: str, name: str) -> None:
        super().__init__(frames, index)
        self._call_id = call_id
        self._name = name

    def open(self) -> bytes:
        """The item begins, empty."""
        return self._added(self.item("in_progress"))

    def add(self, text: str) -> bytes:
        """Some more text."""
        self._texts.append(text)
        return self._frames.frame(ArgumentsDelta(**self._place(), delta=text))

    def close(self) -> bytes:
        """The text is whole; the item comes next."""
        return self._frames.frame(
            ArgumentsDone(**self._place(), name=self._name, arguments=self.text)
        )

    def item(self, status: ItemStatus) -> FunctionCallItem:
        """What it has become."""
        return FunctionCallItem(
            id=self.id, call_id=self._call_id, name=self._name, arguments=self.text, status=status
        )


class GrowingCustomCall(_Growing):
    """A custom tool's call: no parts, but a text, which is known when its JSON is whole."""

    prefix = "ctc"

    def __init__(self, frames: EventFrames, index: int, call_id: str, name: str) -> None:
        super().__init__(frames, index)
        self._call_id = call_id
        self._name = name

    def open(self) -> bytes:
        """The item begins, empty."""
        return self._added(self.item("in_progress"))

    def add(self, text: str) -> bytes:
        """Some more of the JSON around the text; nothing to tell yet."""
        self._texts.append(text)
        return b""

    def close(self) -> bytes:
        """The text, all at once; the item comes next."""
        text = custom_input(self.text)
        delta = CustomInputDelta(**self._place(), delta=text)
        done = CustomInputDone(**self._place(), input=text)
        return self._frames.frame(delta) + self._frames.frame(done)

    def item(self, status: ItemStatus) -> CustomToolCallItem:
        """What it has become."""
        return CustomToolCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            input=custom_input(self.text),
            status=status,
        )


GrowingItem: TypeAlias = GrowingMessage | GrowingThoughts | GrowingCall | GrowingCustomCall


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
