"""Pieces of output in the shapes of OpenAI's chat completions: a message, or deltas of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET

from machd.dialects.chat.answer import (
    CallDelta,
    CallFunction,
    CallFunctionDelta,
    ChatDelta,
    ChatResponseMessage,
    ToolCall,
)
from machd.dialects.chat.messages import gap_between
from machd.serving.output import (
    Content,
    OutputPiece,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


class ContentGaps:
    """Keeps the texts of one choice apart that had a call between them.

    Chat completions join them, and calls come without the white space around them.
    """

    def __init__(self) -> None:
        """Begin where nothing has been said."""
        self._said = ""
        self._is_after_call = False

    def filled(self, pieces: Iterable[OutputPiece]) -> list[OutputPiece]:
        """The next pieces, with a gap before a text that goes on after a call."""
        return [self._filled(piece) for piece in pieces]

    def _filled(self, piece: OutputPiece) -> OutputPiece:
        if isinstance(piece, ToolCallStart):
            self._is_after_call = True
        if not isinstance(piece, Content):
            return piece
        gap = gap_between(self._said, piece.text) if self._is_after_call else ""
        self._said, self._is_after_call = piece.text, False
        return Content(gap + piece.text)


def chat_message(pieces: Sequence[OutputPiece]) -> ChatResponseMessage:
    """A whole message. Its content is null where there are calls and no text."""
    pieces = ContentGaps().filled(pieces)
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) or UNSET
    calls = _tool_calls(pieces)
    return ChatResponseMessage(
        content=None if calls and not content else content,
        reasoning_content=thoughts,
        reasoning=thoughts,
        tool_calls=calls or UNSET,
    )


def chat_deltas(pieces: Iterable[OutputPiece]) -> list[ChatDelta]:
    """What comes next of a message, in its order; none is empty.

    A delta holds thoughts, text or one call, because clients look at one of them in each chunk.
    Pieces come from the choice's :class:`ContentGaps`.
    """
    runs: list[list[OutputPiece]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallEnd):
            continue
        if runs and _kind(runs[-1][0]) == _kind(piece):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [_delta(run) for run in runs]


def _kind(piece: OutputPiece) -> tuple[type[OutputPiece], int]:
    """What a run has in common: what it is, and of which call."""
    if isinstance(piece, Reasoning | Content):
        return type(piece), 0
    return ToolCallStart, piece.index


def _delta(run: Sequence[OutputPiece]) -> ChatDelta:
    text = "".join(
        piece.text for piece in run if not isinstance(piece, ToolCallStart | ToolCallEnd)
    )
    match run[0]:
        case Reasoning():
            return ChatDelta(reasoning_content=text, reasoning=text)
        case Content():
            return ChatDelta(content=text)
        case ToolCallStart(index=index, call_id=call_id, name=name):
            function = CallFunctionDelta(name=name, arguments=text)
            return ChatDelta(
                tool_calls=[CallDelta(index=index, id=call_id, type="function", function=function)]
            )
        case ToolCallArguments(index=index) | ToolCallEnd(index=index):
            function = CallFunctionDelta(arguments=text)
            return ChatDelta(tool_calls=[CallDelta(index=index, function=function)])


def _tool_calls(pieces: Sequence[OutputPiece]) -> list[ToolCall]:
    starts = [piece for piece in pieces if isinstance(piece, ToolCallStart)]
    arguments = {start.index: "" for start in starts}
    for piece in pieces:
        if isinstance(piece, ToolCallArguments):
            arguments[piece.index] += piece.text
    return [
        ToolCall(
            id=start.call_id,
            function=CallFunction(name=start.name, arguments=arguments[start.index]),
        )
        for start in starts
    ]
