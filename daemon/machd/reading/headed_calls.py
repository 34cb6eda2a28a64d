"""Calls as a name, a marker and JSON, one after the other, without a marker at the end.

Mistral writes ``name[CALL_ID]id[ARGS]{…}``, Kimi K2 ``functions.name:0<|tool_call_argument_begin|>{…}``,
so a call is known when its JSON ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from machd.engine.protocol.chat_format import parsed_call
from machd.reading.json_text import JsonText, NotJsonError
from machd.reading.tool_call_text import CallSink

_MAX_HEADER_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class CallHeader:
    """The text in front of a call's arguments.

    Attributes:
        name: Matches the name, its one group, at the beginning.
        tail: Matches the text between the name and the arguments.
        opening: Optional marker before a call.
        closing: Optional marker after a call; empty where the format has none.
    """

    name: re.Pattern[str]
    tail: re.Pattern[str]
    opening: str
    closing: str


CALL_HEADERS: Mapping[str, CallHeader] = {
    "mistral": CallHeader(
        name=re.compile(r"([\w.-]+)"),
        tail=re.compile(r"\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?\[ARGS\]\s*"),
        opening="[TOOL_CALLS]",
        closing="",
    ),
    "kimi_k2": CallHeader(
        name=re.compile(r"(?:functions\.)?([\w.-]+?)(?=:|\Z)"),
        tail=re.compile(r":\d+\s*<\|tool_call_argument_begin\|>\s*"),
        opening="<|tool_call_begin|>",
        closing="<|tool_call_end|>",
    ),
}
"""By mlx-lm's name of the format."""

_TAIL_CHARACTERS = re.compile(r"[\w\s\[\]<>|:-]*")


class HeadedCalls:
    """Calls one after the other, to the first text that is none; each is sent when it is whole.

    Attributes:
        found: Number of calls that the sink has received.
        is_over: Text that is no call was read.
    """

    def __init__(self, header: CallHeader, sink: CallSink, names: frozenset[str]) -> None:
        self._header = header
        self._sink = sink
        self._names = names
        self._json: JsonText | None = None
        self._name = ""
        self._mended: list[str] = []
        # Of the call that is not known yet, as it was written.
        self._raw: list[str] = []
        self._head = ""
        self.is_over = False
        self.found = 0

    def push(self, text: str) -> str:
        """Return the text that is no call, as it was written; from the first such text on that is all text."""
        for position, character in enumerate(text):
            if self.is_over:
                return self.finish() + text[position:]
            self._raw.append(character)
            if self._json is None:
                self._push_head(character)
            else:
                self._push_arguments(self._json, character)
        return self.finish() if self.is_over else ""

    def show_beginning(self) -> None:
        """Do nothing: a call is sent when it is whole."""

    def finish(self) -> str:
        """Return the text held back, which cannot become a call any more."""
        raw, self._raw = "".join(self._raw), []
        return raw

    def _push_head(self, character: str) -> None:
        self._head = (self._head + character).lstrip()
        opening, closing = self._header.opening, self._header.closing
        if self._head == closing:
            self._raw = []
        if self._head in (opening, closing):
            self._head = ""
        if opening.startswith(self._head) or closing.startswith(self._head):
            return
        found = self._header.name.match(self._head)
        tail = "" if found is None else self._head[found.end() :]
        if found is not None and not tail:
            written = found[1]
            # "functions" may be the beginning of a prefix.
            self.is_over = not (
                any(name.startswith(written) for name in self._names)
                or "functions.".startswith(written)
            )
        elif found is None or found[1] not in self._names:
            self.is_over = True
        elif character == "{" and self._header.tail.fullmatch(tail[:-1]):
            self._name, self._head = found[1], ""
            self._json, self._mended = JsonText(), []
            self._push_arguments(self._json, character)
        else:
            is_open = _TAIL_CHARACTERS.fullmatch(tail) and len(tail) <= _MAX_HEADER_CHARACTERS
            self.is_over = not is_open

    def _push_arguments(self, json_text: JsonText, character: str) -> None:
        try:
            self._mended.append(json_text.push(character))
            if not json_text.is_done:
                return
            call = parsed_call({"name": self._name, "arguments": json.loads("".join(self._mended))})
        except (NotJsonError, ValueError, RecursionError):
            self.is_over = True
            return
        self._json = None
        self._raw = []
        self.found += 1
        self._sink.start(call.name)
        self._sink.arguments(call.arguments)
        self._sink.end()
