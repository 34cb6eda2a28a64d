"""Pieces of one answer, in the order in which they are read; calls get their numbers and ids here."""

from __future__ import annotations

import secrets

from machd.reading import output


class PieceQueue:
    """Pieces that were read and not yet handed out. Takes calls as they are read."""

    def __init__(self) -> None:
        self._pieces: list[output.OutputPiece] = []
        self._calls = 0

    @property
    def calls(self) -> int:
        """Return the number of calls that have begun."""
        return self._calls

    def take(self) -> list[output.OutputPiece]:
        """All pieces since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def content(self, text: str) -> None:
        """Some of the answer's text."""
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, output.Content):
            self._pieces[-1] = output.Content(last.text + text)
        else:
            self._pieces.append(output.Content(text))

    def reasoning(self, text: str) -> None:
        """Some of the thoughts."""
        if text:
            self._pieces.append(output.Reasoning(text))

    def start(self, name: str) -> None:
        """A call begins."""
        call_id = f"call_{secrets.token_hex(12)}"
        self._pieces.append(output.ToolCallStart(self._calls, call_id, name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Some of its arguments."""
        self._pieces.append(output.ToolCallArguments(self._calls - 1, text))

    def end(self) -> None:
        """The call is whole."""
        self._pieces.append(output.ToolCallEnd(self._calls - 1))
