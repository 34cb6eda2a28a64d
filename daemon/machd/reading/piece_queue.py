"""A queue of the pieces of one answer; it numbers calls and gives them ids."""

from __future__ import annotations

import secrets

from machd.reading import output


class PieceQueue:
    """Parsed pieces that were not taken yet; a sink of calls."""

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
        """Add text of the answer."""
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, output.Content):
            self._pieces[-1] = output.Content(last.text + text)
        else:
            self._pieces.append(output.Content(text))

    def reasoning(self, text: str) -> None:
        """Add text of thoughts."""
        if text:
            self._pieces.append(output.Reasoning(text))

    def start(self, name: str) -> None:
        """Begin a call."""
        call_id = f"call_{secrets.token_hex(12)}"
        self._pieces.append(output.ToolCallStart(self._calls, call_id, name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Some of its arguments."""
        self._pieces.append(output.ToolCallArguments(self._calls - 1, text))

    def end(self) -> None:
        """The call is whole."""
        self._pieces.append(output.ToolCallEnd(self._calls - 1))
