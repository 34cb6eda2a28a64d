"""The plain text of an answer, without thoughts and marked calls."""

from __future__ import annotations

from machd.reading.piece_queue import PieceQueue
from machd.reading.tool_call_text import JsonCalls

_WHITESPACE = " \t\r\n"


class ContentText:
    """The answer's plain text: whitespace beside thoughts and calls left out, bare calls found.

    Attributes:
        has_begun: Text was emitted.
    """

    def __init__(self, pieces: PieceQueue, bare_calls: JsonCalls | None) -> None:
        self._pieces = pieces
        self._bare_calls = bare_calls
        self._is_scanning = False
        self._is_after_break = False
        self._has_said = False
        self.has_begun = False
        # A list of pieces: a model may write spaces one by one.
        self._gap: list[str] = []

    @property
    def gap(self) -> str:
        """Whitespace that is content only if more content follows."""
        return "".join(self._gap)

    def push(self, text: str) -> None:
        """Add text."""
        rest = text if self._bare_calls is None else self._scan(self._bare_calls, text)
        if rest:
            self._say(rest)

    def interrupt(self, *, keeps_gap: bool = False) -> None:
        """Thoughts or calls come between; with ``keeps_gap`` whitespace at the end belongs to what was said."""
        if keeps_gap and self._has_said:
            self._pieces.content(self.gap)
        self._gap = []
        self._is_after_break = True
        self._has_said = False

    def end_scan(self) -> None:
        """End the scan of bare calls; text that was held back for one is content."""
        bare_calls = self._bare_calls
        if self._is_scanning and bare_calls is not None:
            self._bare_calls = None
            self._say(bare_calls.finish())

    def drop_cut_call(self, *, is_forced: bool) -> None:
        """Drop the beginning of a bare call that the end of the text cut short; ``is_forced`` where only calls were asked for."""
        bare_calls = self._bare_calls
        if not self._is_scanning or bare_calls is None:
            return
        if is_forced or bare_calls.found or bare_calls.can_go_on:
            self._bare_calls = None
            self.interrupt()

    def finish(self) -> None:
        """End the answer."""
        self.end_scan()
        if self._has_said or not self._is_after_break:
            self._pieces.content(self.gap)
        self._gap = []

    def _scan(self, bare_calls: JsonCalls, text: str) -> str:
        """Return the text outside of calls, for an answer that may begin with a call."""
        if not self._is_scanning:
            whole, text = text, text.lstrip(_WHITESPACE)
            if text and text[0] not in "{[":
                self._bare_calls = None
                return whole
            self._gap.append(whole[: len(whole) - len(text)])
            if not text:
                return ""
            self._is_scanning = True
        called = self._pieces.calls
        rest = bare_calls.push(text)
        if self._pieces.calls > called:
            self.interrupt()
        if rest:
            self._bare_calls = None
        return rest

    def _say(self, text: str) -> None:
        if self._is_after_break and not self._has_said:
            text, self._gap = text.lstrip(_WHITESPACE), []
        said = text.rstrip(_WHITESPACE)
        if said:
            self._pieces.content(self.gap + said)
            self._has_said, self._gap = True, []
            self.has_begun = True
        self._gap.append(text[len(said) :])
