"""A queue of the pieces of one answer; it numbers calls and gives them ids."""

from __future__ import annotations

import secrets

from machd.reading.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


class PieceQueue:
    """Parsed pieces that were not taken yet; a sink of calls."""

    def __init__(self) -> None:
        self._pieces: list[OutputPiece] = []
        self._calls = 0

    @property
    def calls(self) -> int:
        """Return the number of calls that have begun."""
        return self._calls

    def take(self) -> list[OutputPiece]:
        """Return all pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def content(self, text: str) -> None:
        """Add text of the answer."""
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Content):
            self._pieces[-1] = Content(last.text + text)
        else:
            self._pieces.append(Content(text))

    def reasoning(self, text: str) -> None:
        """Add text of thoughts."""
        if text:
            self._pieces.append(Reasoning(text))

    def start(self, name: str) -> None:
        """Begin a call."""
        call_id = f"call_{secrets.token_hex(12)}"
        self._pieces.append(ToolCallStart(self._calls, call_id, name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Add text of the call's arguments."""
        self._pieces.append(ToolCallArguments(self._calls - 1, text))

    def end(self) -> None:
        """End the call."""
        self._pieces.append(ToolCallEnd(self._calls - 1))
