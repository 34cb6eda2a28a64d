"""Calls between markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from machd.engine.protocol.chat_format import JSON_TOOLS, ChatFormat, ParsedToolCall
from machd.serving.piece_queue import PieceQueue
from machd.serving.tool_call_text import JsonCalls

_WHITESPACE = " \t\r\n"

_MAX_CHARACTERS = 262_144
"""Of calls in another spelling than JSON; longer ones are text."""

_SLOW_FORMATS = frozenset({"function_gemma", "gemma4", "kimi_k3", "muse_spark"})
"""Their patterns take the square or the cube of what looks like calls: 20,000 characters took 3 s."""

_MAX_SLOW_CHARACTERS = 16_384
_MAX_SLOW_CALLS = 256


def tool_names(tools: Sequence[Mapping[str, object]]) -> frozenset[str]:
    """Return the names of the functions that may be called, from tools as templates see them."""
    functions = [tool.get("function") for tool in tools]
    return frozenset(str(one.get("name")) for one in functions if isinstance(one, Mapping))


class ToolCallSection:
    """The text between the markers of calls.

    JSON is read as it comes; other spellings when the section ends.

    Args:
        chat_format: Knows the markers, and the spelling.
        tools: That may be called, as templates see them.
        pieces: Take the calls.
        is_forced: Nothing but calls was asked for.
        is_thought: The section stands inside of thoughts.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        tools: Sequence[Mapping[str, object]],
        pieces: PieceQueue,
        *,
        is_forced: bool,
        is_thought: bool,
    ) -> None:
        self._format = chat_format
        self._start, self._end = chat_format.tool_markers or ("", "")
        self._tools = tools
        self._names = tool_names(tools)
        self._pieces = pieces
        self._raw: list[str] = []
        self._json: JsonCalls | None = None
        self._is_blank = True
        self._other: list[str] = []
        self._calls_before = pieces.calls
        self._is_forced = is_forced
        self.is_thought = is_thought

    @property
    def has_called(self) -> bool:
        """Return whether any of it was a call."""
        return self._pieces.calls > self._calls_before

    @property
    def raw(self) -> str:
        """Return the text as the model wrote it so far, the opening marker included."""
        return self._start + "".join(self._raw)

    def push(self, text: str) -> None:
        """Some more of it, markers left out."""
        self._raw.append(text)
        if self._is_blank:
            text = text.lstrip(_WHITESPACE)
            if not text:
                return
            self._is_blank = False
            if text[0] == "{":
                self._json = JsonCalls(self._pieces, self._names, needs_arguments=False)
        if self._json is not None:
            self._other.append(self._json.push(text))

    def finish_cut(self) -> str:
        """Return the text that is no call, of a section in which the text was cut.

        That is nothing, unless the section holds no call for certain and the answer is not made of calls.
        """
        if not self._end and self._json is None:
            text = "".join(self._raw)
            self._send(self._calls(text) or self._calls(text.rpartition(self._start)[0]))
        is_made_of_calls = self._is_forced or self._pieces.calls > 0
        return self.raw if not is_made_of_calls and self._holds_no_call() else ""

    def finish(self, *, is_closed: bool) -> str:
        """Return the text that is no call, as the model wrote it.

        Args:
            is_closed: The closing marker was read.
        """
        if self._json is not None:
            self._other.append(self._json.finish())
            if self._json.found:
                # Some models close a brace too many; some are cut short inside of the marker.
                rest = "".join(self._other).strip(_WHITESPACE + "]},;")
                return "" if self._end.startswith(rest) else rest
        is_whole = is_closed or not self._end
        calls = self._calls("".join(self._raw)) if is_whole else []
        self._send(calls)
        return "" if calls else self.raw + (self._end if is_closed else "")

    def _send(self, calls: Sequence[ParsedToolCall]) -> None:
        for call in calls:
            self._pieces.start(call.name)
            self._pieces.arguments(call.arguments)
            self._pieces.end()

    def _holds_no_call(self) -> bool:
        """Return whether no more text can make a call of a section that is still open."""
        if not self._is_readable("".join(self._raw)):
            return True
        if self._is_blank or self._format.tool_format != JSON_TOOLS:
            return False
        return self._json is None or self._json.is_over

    def _is_readable(self, text: str) -> bool:
        """Return whether mlx-lm's parsers, whose patterns backtrack, finish with it soon."""
        if self._format.tool_format not in _SLOW_FORMATS:
            return len(text) <= _MAX_CHARACTERS
        return len(text) <= _MAX_SLOW_CHARACTERS and text.count("call") <= _MAX_SLOW_CALLS

    def _calls(self, text: str) -> list[ParsedToolCall]:
        """All of them, or none if one is to a function that the client did not name."""
        if not self._is_readable(text):
            return []
        try:
            calls = self._format.parse_tool_calls(text, self._tools)
        except ValueError:
            return []
        return calls if all(call.name in self._names for call in calls) else []
