"""Incremental parser of a chat model's answer: thoughts, calls and content.

No text of a model is an error. An invalid call is content, markers included, and so is the whole text if
the parser itself fails.

In a text that was cut (by ``max_tokens`` or a stop string) the beginning of a call is not content. If the
call has reached its arguments, the client gets their beginning, else nothing. Text that can no longer
become a call is content.

The text after an opening marker is parsed as a section of calls. If it has none, the marker is text and the
text after it is parsed again, so that a mention of a marker hides no call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from machd.engine.protocol.chat_format import ChatFormat, TextState
from machd.reading.content_text import ContentText
from machd.reading.output import OutputParser, OutputPiece
from machd.reading.piece_queue import PieceQueue
from machd.reading.tool_call_section import SectionState, ToolCallSection, tool_names
from machd.reading.tool_call_text import JsonCalls

_WHITESPACE = " \t\r\n"

_MAX_REREAD_CHARACTERS = 1 << 20
"""Of sections that were no calls; behind them no more calls are looked for."""


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The output format of one conversation's answers.

    Attributes:
        chat_format: The model's format of thoughts and calls.
        tools: Tools that may be called, in the templates' shape; without tools, calls are not searched for.
        starts_in: State at the prompt's end.
        continues_thought: The prompt ends inside a thought, so that whitespace may come next.
        stops_after_call: The answer ends after one call.
        has_bare_calls: An answer that begins as JSON may be calls, without markers around them.
        has_marked_calls: Calls may have the format's markers around them.
        is_forced: Nothing but calls was asked for.
        model_id: Of the model that answers, for the log; None where it has no name.
    """

    chat_format: ChatFormat
    tools: tuple[Mapping[str, object], ...] = ()
    starts_in: TextState = TextState.NORMAL
    continues_thought: bool = False
    stops_after_call: bool = False
    has_bare_calls: bool = False
    has_marked_calls: bool = True
    is_forced: bool = False
    model_id: str | None = None

    @property
    def looks_for_markers(self) -> bool:
        """Return whether markers of calls mean anything."""
        return bool(self.tools) and self.has_marked_calls

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that have to reach the parser even if they are special tokens."""
        return self.chat_format.markers(tools=self.looks_for_markers)

    def parser(self, *, streams: bool = True) -> OutputParser:
        """Make a parser for one choice."""
        return _ChatParser(self, streams=streams)


class _ChatParser:
    """A parser that turns to plain content if the inner one raises an error."""

    def __init__(self, output: ChatOutput, *, streams: bool) -> None:
        self._model_id = output.model_id
        self._pieces = PieceQueue()
        self._reader = _Reader(output, self._pieces, streams=streams)
        self._is_broken = False

    @property
    def is_thinking(self) -> bool:
        return not self._is_broken and self._reader.is_thinking

    def push(self, text: str) -> list[OutputPiece]:
        if not text:
            return []
        if self._is_broken:
            self._pieces.content(text)
            return self._pieces.take()
        try:
            self._reader.push(text)
        except Exception as error:  # noqa: BLE001 - no mistake in reading may lose a completion
            self._give_up(error)
        return self._pieces.take()

    def finish(self, *, is_cut: bool) -> list[OutputPiece]:
        if not self._is_broken:
            try:
                self._reader.finish(is_cut=is_cut)
            except Exception as error:  # noqa: BLE001 - the same
                self._give_up(error)
        return self._pieces.take()

    def _give_up(self, error: Exception) -> None:
        log = structlog.get_logger("machd.output", model=self._model_id)
        log.error("output.unreadable", cause=type(error).__name__)
        self._is_broken = True
        self._pieces.content(self._reader.held)


class _Reader:
    """Parser of one answer."""

    def __init__(self, output: ChatOutput, pieces: PieceQueue, *, streams: bool) -> None:
        self._output = output
        self._pieces = pieces
        self._streams = streams
        self._edges = output.chat_format.edges(tools=output.looks_for_markers)
        first = output.chat_format.first_state
        is_header = output.starts_in is TextState.HEADER
        # mlx-lm's name of the state.
        self._state = first if is_header and first is not None else str(output.starts_in)
        self._unread = ""
        self._section: ToolCallSection | None = None
        self._reread_characters = 0
        # Closing marker of calls that were complete before it; it is not text.
        self._late_end = ""
        self._text = ContentText(pieces, self._bare_calls())
        self.is_thinking = output.starts_in is TextState.REASONING
        # Whitespace behind what was thought, which belongs to it if more follows; None before the first of it.
        self._thought_gap: list[str] | None = [] if output.continues_thought else None

    @property
    def held(self) -> str:
        """Return the text that was held back, for an answer that ends here."""
        section = self._section
        raw = "" if section is None else section.marker + section.raw
        return self._text.gap + raw + self._unread

    def push(self, text: str) -> None:
        self._unread += text
        self._read_on()

    def finish(self, *, is_cut: bool) -> None:
        if self._section is not None and is_cut:
            self._section.finish_cut()
            self._section = None
            self._text.interrupt()
        while self._section is not None:
            self._leave(self._section, self._section.finish())
            self._read_on()
        held, self._unread = self._unread, ""
        if is_cut and self._begins_call(held):
            self._text.interrupt()
        elif held and not self._late_end.startswith(held):
            self._take(held)
        if is_cut:
            self._text.drop_cut_call(is_forced=self._output.is_forced)
        self._text.finish()

    def _begins_call(self, held: str) -> bool:
        """Return whether text that may begin a marker belongs to a call; after other text it may also be text."""
        is_text = self._text.has_begun and not (self._output.is_forced or self._pieces.calls)
        return (
            bool(held)
            and not is_text
            and self._state == TextState.NORMAL
            and any(
                then == TextState.TOOL and marker.startswith(held)
                for marker, then in self._edges.get(self._state, ())
            )
        )

    def _read_on(self) -> None:
        while self._unread:
            if (section := self._section) is not None:
                text, self._unread = self._unread, ""
                rest = section.push(text)
                if section.state is SectionState.OPEN:
                    return
                self._leave(section, rest)
                continue
            edges = self._edges.get(self._state, [])
            if self._late_end:
                edges = [*edges, (self._late_end, self._state)]
            before, edge, self._unread = _split(self._unread, edges)
            if before:
                self._take(before)
            if edge is None:
                return
            self._cross(*edge)

    def _cross(self, marker: str, state: str) -> None:
        if marker == self._late_end:
            self._late_end = ""
        elif state == TextState.TOOL:
            self._enter_section(marker)
        else:
            self._state = state
            self._take("")

    def _take(self, text: str) -> None:
        match TextState.named(self._state):
            case TextState.REASONING:
                self._think(text)
            case TextState.HEADER:
                self._stop_thinking()
            case _:
                self._stop_thinking()
                self._text.push(text)

    def _enter_section(self, marker: str) -> None:
        self._text.end_scan()
        thoughts = self._output.chat_format.reasoning_markers
        stands_in_thought = self._state == TextState.REASONING and thoughts is not None
        self._section = ToolCallSection(
            self._output.chat_format,
            marker,
            self._output.tools,
            self._pieces,
            streams=self._streams,
            thought_end=thoughts[1] if stands_in_thought and thoughts is not None else None,
        )
        self._late_end = ""

    def _leave(self, section: ToolCallSection, rest: str) -> None:
        """Continue after a section: in the state before it, or from its marker if it was text."""
        self._section = None
        if self._state not in (TextState.REASONING, TextState.NORMAL):
            self._state = TextState.NORMAL
        if section.state is SectionState.CALLED:
            self._text.interrupt()
            self._thought_gap = None
            _, end = self._output.chat_format.tool_markers or ("", "")
            self._late_end = end if section.has_open_end else ""
            self._unread = rest
            return
        raw = section.raw
        self._reread_characters += len(raw)
        if self._reread_characters > _MAX_REREAD_CHARACTERS:
            self._edges = self._output.chat_format.edges(tools=False)
        self._take(section.marker)
        self._unread = raw + self._unread

    def _think(self, text: str) -> None:
        """Emit thoughts without the whitespace around them."""
        if not self.is_thinking:
            self._text.end_scan()
            self._text.interrupt(keeps_gap=True)
            self.is_thinking, self._thought_gap = True, None
        if self._thought_gap is None:
            text = text.lstrip(_WHITESPACE)
        said = text.rstrip(_WHITESPACE)
        if said:
            self._pieces.reasoning("".join(self._thought_gap or ()) + said)
            self._thought_gap = []
        if self._thought_gap is not None:
            self._thought_gap.append(text[len(said) :])

    def _stop_thinking(self) -> None:
        if self.is_thinking:
            self.is_thinking, self._thought_gap = False, None
            self._text.interrupt()

    def _bare_calls(self) -> JsonCalls | None:
        if not (self._output.tools and self._output.has_bare_calls):
            return None
        names = tool_names(self._output.tools)
        return JsonCalls(self._pieces, names, needs_arguments=True, streams=self._streams)


def _split(text: str, edges: Iterable[tuple[str, str]]) -> tuple[str, tuple[str, str] | None, str]:
    """Return the text before the marker that ends first, the marker's edge, and the text behind it.

    Without a marker: the unambiguous text, None, and text that may begin a marker.
    """
    found: tuple[int, tuple[str, str]] | None = None
    held = 0
    for edge in edges:
        marker = edge[0]
        start = text.find(marker)
        if start >= 0 and (found is None or start + len(marker) < found[0]):
            found = (start + len(marker), edge)
        lengths = range(min(len(marker) - 1, len(text)), held, -1)
        held = next((one for one in lengths if text.endswith(marker[:one])), held)
    if found is None:
        certain = len(text) - held
        return text[:certain], None, text[certain:]
    end, edge = found
    return text[: end - len(edge[0])], edge, text[end:]
