"""Marks in a conversation, which show where a chat template writes its texts, calls and tools.

A mark is a text of characters that no template has, with a name that is drawn for each conversation.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Messages = list[dict[str, object]]
Tools = Sequence[Mapping[str, object]]

_THOUGHT_ENDS = re.compile(r"(?:</think>|<channel\|>|\[/THINK\])\s*")
"""What templates look for to leave out the thoughts of earlier answers."""

_DECODER = json.JSONDecoder()
_MAX_OBJECTS = 8
"""Braces in front of a tool's name that may begin it."""

_BEHIND_TOOL = re.compile(r"[\s,]*")


def _mark(name: str, kind: str, number: int, skipped: int = 0) -> str:
    return f"\ue000{name}{kind}{number}:{skipped}\ue001"


def marked_text(message: dict[str, object], number: int, name: str) -> dict[str, object]:
    """Return a message with marks around its text, inside the white space that templates strip, and behind thoughts."""
    content = message.get("content")
    if not isinstance(content, str) or not (said := content.strip()):
        return message
    start = content.index(said)
    stop = start + len(said)
    ends = (start + one.end() for one in _THOUGHT_ENDS.finditer(said))
    cuts = [start, *(one for one in ends if one < stop)]
    parts = [
        _mark(name, "s", number, one) + content[one:end]
        for one, end in zip(cuts, [*cuts[1:], stop], strict=True)
    ]
    marked = "".join([content[:start], *parts, _mark(name, "e", number, stop), content[stop:]])
    return {**message, "content": marked}


def marked_calls(message: dict[str, object], number: int, name: str) -> dict[str, object]:
    """Return a message with marks in front of the names of its calls, and around its thoughts."""
    marked = dict(message)
    thought = message.get("reasoning_content")
    if isinstance(thought, str) and (said := thought.strip()):
        start = thought.index(said)
        ending = thought[start + len(said) :]
        marks = (_mark(name, "r", number), _mark(name, "t", number))
        marked["reasoning_content"] = f"{thought[:start]}{marks[0]}{said}{marks[1]}{ending}"
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        marked["tool_calls"] = [_named(one, _mark(name, "c", number)) for one in calls]
    return marked


def marked_tools(tools: Tools, name: str) -> Tools:
    """Return tools with marks in front of their names and descriptions."""
    return [_named(one, _mark(name, "f", index)) for index, one in enumerate(tools)]


def _named(one: Mapping[str, object], mark: str) -> dict[str, object]:
    """Return a call or a tool with marks in front of its function's name and description."""
    function = one.get("function")
    if not isinstance(function, Mapping):
        return dict(one)
    marked = {key: f"{mark}{function[key]}" for key in ("name", "description") if function.get(key)}
    return {**one, "function": {**function, **marked}}


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark.

    Attributes:
        kind: ``s`` and ``e`` begin and end a text, ``r`` and ``t`` a thought; ``c`` begins a call, ``f`` a tool.
        number: Of the message or tool.
        skipped: Characters of the message's text before it.
        at: Its place in the text without marks.
    """

    kind: str
    number: int
    skipped: int
    at: int


@dataclass(frozen=True, slots=True)
class Marks:
    """A rendered text without its marks."""

    plain: str
    found: list[Mark]

    @classmethod
    def read(cls, marked: str, name: str) -> Marks:
        """Take the marks out of a text."""
        found: list[Mark] = []
        plain: list[str] = []
        at = length = 0
        for one in re.finditer(f"\ue000{name}([a-z])(\\d+):(\\d+)\ue001", marked):
            plain.append(marked[at : one.start()])
            length += one.start() - at
            at = one.end()
            found.append(Mark(one[1], int(one[2]), int(one[3]), length))
        return cls("".join([*plain, marked[at:]]), found)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a message in the prompt, in characters.

    Attributes:
        number: The message's index; None where more than one message, or the template, may have written it.
        skipped: Characters of the message's text before it; None for another part than its text.
    """

    start: int
    stop: int
    number: int | None
    skipped: int | None = None


@dataclass(frozen=True, slots=True)
class ToolSpans:
    """Tools in the prompt, in characters.

    Attributes:
        starts: Where each begins.
        stop: Where the last one ends.
        is_exact: Whether that is known; otherwise it ends nowhere behind.
    """

    starts: Sequence[int] = ()
    stop: int = -1
    is_exact: bool = True

    def index(self, at: int) -> int | None:
        """Return the tool at a place: -1 for none, None where it is not known."""
        found = bisect_right(self.starts, at) - 1
        if found < 0 or at > self.stop:
            return -1
        is_last = found == len(self.starts) - 1
        return None if is_last and not self.is_exact else found


@dataclass(slots=True)
class SpanReader:
    """Reads the marked parts of messages in order. What a cut-off mark leaves open is unknown.

    Attributes:
        told: Where the last part ended.
        opened: The mark of the part that has begun.
        calls: Where the open calls began, and the number of their message.
    """

    text: str
    messages: Messages
    spans: list[Span] = field(default_factory=list)
    told: int = 0
    opened: Mark | None = None
    calls: tuple[int, int] | None = None

    def read(self, marks: Iterable[Mark]) -> list[Span]:
        """Return the parts."""
        for mark in marks:
            if mark.kind == "c":
                self._call(mark)
            elif mark.kind in "sr":
                self._close_calls(mark.at)
                self._open(mark)
            elif mark.kind in "et":
                self._close_calls(mark.at)
                self._close(mark)
        if self.opened is not None:
            self._add(self.opened.at, len(self.text), None)
        self._close_calls(len(self.text))
        return self.spans

    def _add(self, start: int, stop: int, number: int | None, skipped: int | None = None) -> None:
        self.spans.append(Span(start, stop, number, skipped))
        self.told = stop

    def _open(self, mark: Mark) -> None:
        """Begin a part, or go on behind a thought in a text."""
        before = self.opened
        if before is None:
            content = str(self.messages[mark.number].get("content"))
            if mark.kind == "s" and mark.skipped > len(content) - len(content.lstrip()):
                # The template took the thought out of the text, and may have written it elsewhere.
                self._add(self.told, mark.at, None)
        elif (before.kind, before.number) != (mark.kind, mark.number):
            self._add(before.at, mark.at, None)
        elif mark.at - before.at == mark.skipped - before.skipped:
            return
        else:
            self._add(before.at, mark.at, mark.number)
        self.opened = mark

    def _close(self, mark: Mark) -> None:
        before, self.opened = self.opened, None
        kind = "s" if mark.kind == "e" else "r"
        if before is None or (before.kind, before.number) != (kind, mark.number):
            self._add(self.told, mark.at, None)
            return
        content = str(self.messages[mark.number].get("content"))
        is_told = self.text[before.at : mark.at] == content[before.skipped : mark.skipped]
        skipped = before.skipped if kind == "s" and is_told else None
        self._add(before.at, mark.at, mark.number, skipped)

    def _call(self, mark: Mark) -> None:
        if self.calls is not None and self.calls[1] != mark.number:
            self._close_calls(mark.at)
        self.calls = self.calls or (mark.at, mark.number)

    def _close_calls(self, upto: int) -> None:
        if self.calls is None:
            return
        (start, number), self.calls = self.calls, None
        stop = self.text.rfind("}", start, upto) + 1
        # Without an object's end it is not known where the call ends.
        self._add(start, stop or upto, number if stop else None)


def tool_spans(marks: Marks, count: int, spans: Sequence[Span]) -> ToolSpans:
    """Return where the prompt has each tool; nowhere if it does not show all of them once, in order."""
    found = [one for one in marks.found if one.kind == "f"]
    is_ordered = all(one.number <= two.number for one, two in pairwise(found))
    if not found or not is_ordered or {one.number for one in found} != set(range(count)):
        return ToolSpans()
    text = marks.plain
    starts: list[int] = []
    stop: int | None = 0
    for number in range(count):
        own = [one.at for one in found if one.number == number]
        start, stop = _object_around(text, own[0], own[-1], stop or 0)
        starts.append(start)
    if stop is None:
        stop = next((one.start for one in spans if one.start > starts[-1]), len(text))
        return ToolSpans(starts, stop, is_exact=False)
    behind = _BEHIND_TOOL.match(text, stop)
    return ToolSpans(starts, stop if behind is None else behind.end())


def _object_around(text: str, first: int, last: int, least: int) -> tuple[int, int | None]:
    """Return the outer JSON object with two places, no earlier than ``least``; the first place and None without one."""
    start, stop, begins = first, None, first
    for _ in range(_MAX_OBJECTS):
        begins = text.rfind("{", least, begins)
        if begins < 0:
            break
        try:
            _, ends = _DECODER.raw_decode(text, begins)
        except (ValueError, RecursionError):
            continue
        if ends <= last:
            continue
        start, stop = begins, ends
    return start, stop
