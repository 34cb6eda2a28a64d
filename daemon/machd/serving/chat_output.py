"""Reads a chat model's answer: thoughts, calls and content told apart while they come.

Nothing that a model writes is an error. What looks like a call and is none comes out as content,
markers included, and so does everything if reading itself should fail.

A text that was cut (by ``max_tokens`` or a stop text) is another matter: the beginning of a call is
not content. If the call had come to its arguments, the client gets their beginning, else nothing. Only
text that can no longer become a call is content, and not even that where the answer has to be calls or
has made one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from machd.engine.protocol.chat_format import ChatFormat, TextSplitter, TextState
from machd.serving.content_text import ContentText
from machd.serving.output import OutputParser, OutputPiece
from machd.serving.piece_queue import PieceQueue
from machd.serving.tool_call_section import ToolCallSection, tool_names
from machd.serving.tool_call_text import JsonCalls

_WHITESPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """The output format of one conversation's answers.

    Attributes:
        chat_format: How the model writes.
        tools: That may be called, as templates see them; without any, calls are not looked for.
        starts_in: Where the prompt left off.
        continues_thought: It left off in the middle of a thought, so that whitespace may come next.
        stops_after_call: One call is all that the client wants.
        has_bare_calls: An answer that begins as JSON may be calls, without markers around them.
        has_marked_calls: Calls may have the format's markers around them.
        is_forced: Nothing but calls was asked for.
    """

    chat_format: ChatFormat
    tools: tuple[Mapping[str, object], ...] = ()
    starts_in: TextState = TextState.NORMAL
    continues_thought: bool = False
    stops_after_call: bool = False
    has_bare_calls: bool = False
    has_marked_calls: bool = True
    is_forced: bool = False

    @property
    def looks_for_markers(self) -> bool:
        """Return whether markers of calls mean anything."""
        return bool(self.tools) and self.has_marked_calls

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that have to reach the parser even if they are special tokens."""
        return self.chat_format.markers(tools=self.looks_for_markers)

    def parser(self) -> OutputParser:
        """A fresh one, for one choice."""
        return _ChatParser(self)


class _ChatParser:
    """Stands between a reader and whatever a model's text may do to it."""

    def __init__(self, output: ChatOutput) -> None:
        self._pieces = PieceQueue()
        self._reader = _Reader(output, self._pieces)
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
        log = structlog.get_logger("machd.output")
        log.error("output.unreadable", cause=type(error).__name__)
        self._is_broken = True
        self._pieces.content(self._reader.held)


class _Reader:
    """One answer, stretch by stretch."""

    def __init__(self, output: ChatOutput, pieces: PieceQueue) -> None:
        self._output = output
        self._pieces = pieces
        self._splitter = self._splitter_in(output.starts_in, tools=output.looks_for_markers)
        self._state = output.starts_in
        self._section: ToolCallSection | None = None
        self._thoughts: TextSplitter | None = None
        self._text = ContentText(pieces, self._bare_calls())
        self.is_thinking = output.starts_in is TextState.REASONING
        # Whitespace behind what was thought, which belongs to it if more follows; None before the first of it.
        self._thought_gap: list[str] | None = [] if output.continues_thought else None
        self._untaken: deque[tuple[TextState, str]] = deque()

    @property
    def held(self) -> str:
        """Return the text that came and was not handed out, for an answer that ends here."""
        section = "" if self._section is None else self._section.raw
        return "".join([self._text.gap, section, *(stretch for _, stretch in self._untaken)])

    def push(self, text: str) -> None:
        self._untaken.extend(self._splitter.push(text))
        self._take_all()

    def finish(self, *, is_cut: bool) -> None:
        held = self._splitter.finish()
        if is_cut and self._begins_call(held):
            self._text.interrupt()
        else:
            self._untaken.extend(held)
        self._take_all()
        self._end_section(is_closed=False, is_cut=is_cut)
        self._end_thoughts()
        if is_cut:
            self._text.drop_cut_call(is_forced=self._output.is_forced)
        self._text.finish()

    def _begins_call(self, held: list[tuple[TextState, str]]) -> bool:
        """Return whether text that may begin a marker is a call's: behind other text it may be text as well."""
        markers = self._output.chat_format.tool_markers
        if markers is None or not self._output.looks_for_markers:
            return False
        is_text = self._text.has_begun and not (self._output.is_forced or self._pieces.calls)
        return not is_text and any(
            state is TextState.NORMAL and markers[0].startswith(stretch) for state, stretch in held
        )

    def _take_all(self) -> None:
        while self._untaken:
            state, stretch = self._untaken[0]
            if state is not self._state:
                self._change_state(state)
            self._untaken.popleft()
            self._take(state, stretch)

    def _change_state(self, state: TextState) -> None:
        self._end_section(is_closed=True)
        if state is not TextState.NORMAL:
            self._end_thoughts()
        if state is TextState.TOOL:
            self._text.end_scan()
            is_thought, self.is_thinking = self.is_thinking, False
            self._section = ToolCallSection(
                self._output.chat_format,
                self._output.tools,
                self._pieces,
                is_forced=self._output.is_forced,
                is_thought=is_thought,
            )
        elif state is TextState.HEADER:
            self._stop_thinking()
        self._state = state

    def _take(self, state: TextState, stretch: str) -> None:
        match state:
            case TextState.TOOL:
                assert self._section is not None, "a section opens with its state"
                self._section.push(stretch)
            case TextState.REASONING:
                self._think(stretch)
            case TextState.NORMAL:
                self._take_normal(stretch)
            case TextState.HEADER:
                pass

    def _take_normal(self, stretch: str) -> None:
        if self._thoughts is None:
            self._say(stretch)
            return
        for state, part in self._thoughts.push(stretch):
            self._take_after_thought(state, part)

    def _take_after_thought(self, state: TextState, text: str) -> None:
        if state is TextState.REASONING:
            self._think(text)
        else:
            self._say(text)

    def _end_section(self, *, is_closed: bool, is_cut: bool = False) -> None:
        section = self._section
        if section is None:
            return
        rest = section.finish_cut() if is_cut else section.finish(is_closed=is_closed)
        self._section = None
        has_called = section.has_called
        if has_called or not rest:
            self._text.interrupt()
        if section.is_thought:
            # Nothing has ended the thoughts that it stood in.
            self._thoughts = self._splitter_in(TextState.REASONING, tools=False)
            self.is_thinking = True
            self._thought_gap = None if has_called else self._thought_gap
        self._take_normal(rest)

    def _end_thoughts(self) -> None:
        """Settle what was held back because thoughts around a call might have ended there."""
        thoughts, self._thoughts = self._thoughts, None
        for state, part in thoughts.finish() if thoughts is not None else ():
            self._take_after_thought(state, part)

    def _think(self, text: str) -> None:
        """Thoughts, less the whitespace around them."""
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

    def _say(self, text: str) -> None:
        self._stop_thinking()
        self._text.push(text)

    def _stop_thinking(self) -> None:
        if self.is_thinking:
            self.is_thinking, self._thought_gap = False, None
            self._text.interrupt()

    def _splitter_in(self, state: TextState, *, tools: bool) -> TextSplitter:
        return self._output.chat_format.splitter(tools=tools, starts_in=state)

    def _bare_calls(self) -> JsonCalls | None:
        if not (self._output.tools and self._output.has_bare_calls):
            return None
        return JsonCalls(self._pieces, tool_names(self._output.tools), needs_arguments=True)
