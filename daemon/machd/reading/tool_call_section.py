"""Calls between markers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial

from machd.engine.protocol.chat_format import (
    BARE_CALL_MARKERS,
    ChatFormat,
    ParsedToolCall,
    parsed_call,
)
from machd.reading.gemma_calls import GEMMA_QUOTES, read_gemma_calls
from machd.reading.headed_calls import CALL_HEADERS, HeadedCalls
from machd.reading.piece_queue import PieceQueue
from machd.reading.pythonic_calls import well_formed_python
from machd.reading.tagged_calls import CALL_TAGS, CallTags, OpenValueError, read_tagged_calls
from machd.reading.tool_call_text import JsonCalls

_WHITESPACE = " \t\r\n"

_MAX_CHARACTERS = 262_144
"""Of calls that are read when they are whole; longer ones are text."""

_MAX_ENDS = 16
"""Closing markers of a section that may stand inside a value; each takes a reading of all before it."""

_BEGINNINGS: Mapping[str, tuple[str, ...]] = {
    "function_gemma": ("call:",),
    "gemma4": ("call:",),
    "glm47": (),
    "json_tools": ("{", "["),
    "kimi_k3": ("<|open|>call",),
    "laguna": (),
    "longcat": (),
    "minicpm5": (),
    "minimax_m2": ("<invoke name=",),
    "muse_spark": ("<atem:invoke",),
    "pythonic": ("[",),
    "qwen3_coder": ("<function=",),
}
"""Texts with which calls begin; where there are none, with a function's name."""

_PLAIN_FORMATS = frozenset({"glm47", "laguna"})
"""They are also written as a name and JSON or ``key=value``, which mlx-lm reads."""


class SectionState(Enum):
    """The state of a section."""

    OPEN = auto()
    CALLED = auto()
    """It is over, and was calls."""

    TEXT = auto()
    """It is over: what stands behind its opening marker is no call."""


def tool_names(tools: Sequence[Mapping[str, object]]) -> frozenset[str]:
    """Return the names of the functions that may be called, from tools as templates see them."""
    functions = [tool.get("function") for tool in tools]
    return frozenset(str(one.get("name")) for one in functions if isinstance(one, Mapping))


class ToolCallSection:
    """The text behind an opening marker, to its end or to where it turns out to be no call.

    JSON is read as it comes; other spellings when a closing marker comes that stands in no value.

    ``thought_end`` is the marker that ends the thoughts in which the section stands; None elsewhere.

    Attributes:
        state: Whether it is over.
        is_closed: Its closing marker was read.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        marker: str,
        tools: Sequence[Mapping[str, object]],
        pieces: PieceQueue,
        *,
        streams: bool,
        thought_end: str | None,
    ) -> None:
        self._format = chat_format
        self._name = chat_format.tool_format or ""
        self.marker = marker
        start, end = chat_format.tool_markers or ("", "")
        bare = BARE_CALL_MARKERS.get(self._name, ("", ""))
        self._is_bare = marker == bare[0] != start
        self._end = bare[1] if self._is_bare else end
        self._markers = tuple(one for one in (start, self._end) if one)
        self._tools = tools
        self._names = tool_names(tools)
        self._pieces = pieces
        self._streams = streams
        self._thought_end = thought_end or ""
        self._raw: list[str] = []
        self._characters = 0
        self._head: str | None = ""
        self._reader: JsonCalls | HeadedCalls | None = None
        self._tail = ""
        self._ends: list[int] = []
        self._searched = 0
        self.state = SectionState.OPEN
        self.is_closed = False

    def _keys_of(self, name: str) -> Collection[str] | None:
        """Return the arguments that a function's schema lists; None where it lists none."""
        for tool in self._tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and function.get("name") == name:
                schema = function.get("parameters")
                listed = schema.get("properties") if isinstance(schema, Mapping) else None
                return listed.keys() if isinstance(listed, Mapping) and listed else None
        return None

    @property
    def has_open_end(self) -> bool:
        """Return whether its closing marker may still come behind the calls."""
        return self._is_bare or not self.is_closed

    @property
    def raw(self) -> str:
        """Return the text behind the opening marker as it was written so far."""
        return "".join(self._raw)

    def push(self, text: str) -> str:
        """Return the text behind it once it is over and was calls; empty before."""
        self._raw.append(text)
        if self._head is not None:
            self._head = text = (self._head + text).lstrip(_WHITESPACE)
            self._choose_reader(self._head)
        if self._head is not None or self.state is SectionState.TEXT:
            return ""
        return self._look_for_end(text) if self._reader is None else self._read(self._reader, text)

    def finish(self) -> str:
        """End it, as the model has ended its text; what stood behind the calls is returned."""
        rest, self.state = "", SectionState.TEXT
        if self._reader is not None:
            rest = self._reader.finish()
            self.state = SectionState.CALLED if self._reader.found else SectionState.TEXT
            return rest if self._reader.found else ""
        whole = self.raw
        tags = CALL_TAGS.get(self._name)
        calls_end_themselves = not self._is_bare and (tags is None or bool(tags.function_end))
        with suppress(ValueError, RecursionError):
            if calls_end_themselves:
                self._send(self._calls(whole, is_closed=False))
            elif self._ends:
                # Then the first marker did end it, and the end of the value before it is missing.
                end, *_ = self._ends
                self._send(self._calls(whole[:end], is_lenient=True))
                self.is_closed = True
                rest = whole[end + len(self._end) :]
        return rest

    def finish_cut(self) -> None:
        """End it where the text was cut: the client gets what is known of a call's arguments."""
        if self._reader is not None:
            self._reader.show_beginning()

    def _choose_reader(self, text: str) -> None:
        if not text:
            return
        header = CALL_HEADERS.get(self._name)
        if not self._is_bare and (text[0] == "{" or (text[0] == "[" and self._name != "pythonic")):
            self._reader = JsonCalls(
                self._pieces, self._names, needs_arguments=False, streams=self._streams
            )
            self._head = None
        elif header is not None:
            self._reader = HeadedCalls(header, self._pieces, self._names)
            self._head = None
        else:
            beginnings = () if self._is_bare else _BEGINNINGS.get(self._name, ("",))
            written = text if beginnings else text.lstrip("\"'")
            starts = beginnings or self._names
            if any(written.startswith(one) for one in starts):
                self._head = None
            elif not any(one.startswith(written) for one in starts):
                self.state = SectionState.TEXT

    def _read(self, reader: JsonCalls | HeadedCalls, text: str) -> str:
        rest = reader.push(text)
        if not reader.is_over:
            return ""
        self.state = SectionState.CALLED if reader.found else SectionState.TEXT
        return rest if reader.found else ""

    def _look_for_end(self, text: str) -> str:
        """Read the calls where the section ends; a marker inside of a value ends nothing."""
        self._characters += len(text)
        window = self._tail + text
        ends = [one for one in (self._end, self._thought_end) if one]
        self._tail = window[1 - max(map(len, ends), default=1) :]
        if any(one in window for one in ends):
            rest = self._read_to_end(self.raw)
            if self.state is not SectionState.OPEN:
                return rest
        if self._characters > _MAX_CHARACTERS:
            self.state = SectionState.TEXT
        return ""

    def _read_to_end(self, whole: str) -> str:
        while (at := whole.find(self._end, self._searched) if self._end else -1) >= 0:
            if self._ends_thought(whole, at):
                return ""
            self._searched = at + len(self._end)
            try:
                self._send(self._calls(whole[:at]))
            except OpenValueError:
                self._ends.append(at)
                if len(self._ends) < _MAX_ENDS:
                    continue
                self.state = SectionState.TEXT
            except (ValueError, RecursionError):
                self.state = SectionState.TEXT
            self.is_closed = self.state is SectionState.CALLED
            return whole[self._searched :] if self.is_closed else ""
        self._ends_thought(whole, len(whole))
        return ""

    def _ends_thought(self, whole: str, until: int) -> bool:
        """Tell whether the thoughts around it end first, so that their marker is no part of a call."""
        if not self._thought_end or whole.find(self._thought_end, self._searched, until) < 0:
            return False
        self.state = SectionState.TEXT
        return True

    def _send(self, calls: Sequence[ParsedToolCall]) -> None:
        if any(call.name not in self._names for call in calls):
            raise ValueError("no tool has this name")
        self.state = SectionState.CALLED
        for call in calls:
            self._pieces.start(call.name)
            self._pieces.arguments(call.arguments)
            self._pieces.end()

    def _calls(
        self, text: str, *, is_closed: bool = True, is_lenient: bool = False
    ) -> list[ParsedToolCall]:
        """Read the calls, at least one, that a text is made of.

        Raises:
            OpenValueError: The text ends inside a value.
            ValueError: It is something else.
        """
        if (quote := GEMMA_QUOTES.get(self._name)) is not None:
            found = read_gemma_calls(quote, text)
            calls = [parsed_call({"name": name, "arguments": given}) for name, given in found]
        elif (tags := CALL_TAGS.get(self._name)) is not None:
            calls = self._tagged_calls(tags, text, is_closed=is_closed, is_lenient=is_lenient)
        else:
            written = well_formed_python(text) if self._name == "pythonic" else text
            calls = self._format.parse_tool_calls(written, self._tools)
        if not calls:
            raise ValueError("there is no call")
        return calls

    def _tagged_calls(
        self, tags: CallTags, text: str, *, is_closed: bool, is_lenient: bool
    ) -> list[ParsedToolCall]:
        parse = partial(self._format.parse_tool_calls, tools=self._tools)
        lead = self.marker if self._is_bare else ""
        try:
            tagged = read_tagged_calls(
                tags,
                lead + text,
                self._markers,
                is_closed=is_closed,
                is_lenient=is_lenient,
                keys_of=self._keys_of,
            )
        except OpenValueError:
            raise
        except ValueError:
            if self._name not in _PLAIN_FORMATS or "<arg_key>" in text:
                raise
            calls = parse(text)
            if any(call.arguments.startswith('{"raw": ') for call in calls) and "raw" not in text:
                raise  # mlx-lm's name for what it cannot read
            return calls
        return [call.parsed(parse) for call in tagged]
