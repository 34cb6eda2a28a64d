"""Pieces of a chat completion's text: thoughts, content, calls.

Dialects write these pieces in their own shapes and never parse the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a call.

    Attributes:
        index: Number of the call in its choice, from 0. Calls never interleave.
        call_id: A unique id, such as ``call_5f2c...``.
        name: Name of one of the request's tools.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments; all pieces together are the JSON text of an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The end of a whole call; a call that ``max_tokens`` cut short has none."""

    index: int


OutputPiece: TypeAlias = Reasoning | Content | ToolCallStart | ToolCallArguments | ToolCallEnd


def joined_pieces(pieces: Iterable[OutputPiece]) -> tuple[OutputPiece, ...]:
    """Join neighbouring pieces of one kind: thoughts, content, a call's arguments."""
    joined: list[OutputPiece] = []
    for _, group in groupby(pieces, lambda one: (type(one), getattr(one, "index", None))):
        run = list(group)
        if isinstance(run[0], Reasoning | Content | ToolCallArguments):
            run = [replace(run[0], text="".join(getattr(one, "text", "") for one in run))]
        joined += run
    return tuple(joined)


class OutputParser(Protocol):
    """Parser of one choice: takes final text and returns pieces, none of them empty."""

    @property
    def is_thinking(self) -> bool:
        """Return whether the text is inside of reasoning."""
        ...

    def push(self, text: str) -> list[OutputPiece]:
        """Parse text, and return the pieces that are final."""
        ...

    def finish(self, *, is_cut: bool) -> list[OutputPiece]:
        """The rest, when no more text comes; ``is_cut`` if ``max_tokens`` or a stop text ended it."""
        ...


class OutputFormat(Protocol):
    """The output format of one request's answers. Immutable."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that have to reach the parser even if they are special tokens."""
        ...

    @property
    def stops_after_call(self) -> bool:
        """Return whether a choice ends with its first call."""
        ...

    def parser(self, *, streams: bool = True) -> OutputParser:
        """Make a parser for one choice.

        With ``streams`` a call's arguments are given while they are written; else a call is given when it is whole.
        """
        ...


class PlainOutput:
    """An output format whose text is all content. It has no state, so it is its own parser."""

    markers: tuple[str, ...] = ()
    stops_after_call = False
    is_thinking = False

    def parser(self, *, streams: bool = True) -> PlainOutput:
        """Return itself."""
        del streams
        return self

    def push(self, text: str) -> list[OutputPiece]:
        """Return all text as content."""
        return [Content(text)] if text else []

    def finish(self, *, is_cut: bool) -> list[OutputPiece]:
        """Return nothing: no text is held back."""
        del is_cut
        return []


PLAIN_OUTPUT: OutputFormat = PlainOutput()
"""The output format of completions without a conversation."""
