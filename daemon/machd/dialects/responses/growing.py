"""One output item of a response while it grows, and the events that tell of it."""

from __future__ import annotations

import secrets
from typing import TypeAlias, TypedDict

import msgspec

from machd.dialects.responses.answer import (
    CustomToolCallItem,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokenLogprob,
    ReasoningItem,
    ReasoningText,
)
from machd.dialects.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    CustomInputDelta,
    CustomInputDone,
    OutputItemAdded,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
)
from machd.dialects.responses.tools import custom_input
from machd.http.sse import event_frame


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
