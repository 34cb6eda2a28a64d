"""A chat completion's text as what it means: thoughts, content, calls.

Dialects write these pieces in their own shapes and never look at the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Some of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins.

    Attributes:
        index: Counts the calls of one choice from 0. Calls never interleave.
        call_id: Ours and unique, such as ``call_5f2c...``.
        name: Of one of the request's tools.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Some of a call's arguments; all of them together are the JSON text of an object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is whole. One that ``max_tokens`` cut short has no such end."""

    index: int


OutputPiece: TypeAlias = Reasoning | Content | ToolCallStart | ToolCallArguments | ToolCallEnd


def joined_pieces(pieces: Iterable[OutputPiece]) -> tuple[OutputPiece, ...]:
    """The same, with neighbours of one kind as one: thoughts, content, a call's arguments."""
    joined: list[OutputPiece] = []
    for _, group in groupby(pieces, lambda one: (type(one), getattr(one, "index", None))):
        run = list(group)
        if isinstance(run[0], Reasoning | Content | ToolCallArguments):
            run = [replace(run[0], text="".join(getattr(one, "text", "") for one in run))]
        joined += run
    return tuple(joined)


class OutputParser(Protocol):
    """Reads one choice. Text goes in as it becomes certain, pieces come out; none is empty."""

    @property
    def is_thinking(self) -> bool:
        """Return whether the text is inside of reasoning."""
        ...

    def push(self, text: str) -> list[OutputPiece]:
        """Return the deltas that this text makes certain."""
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
    """Text is content: no thoughts, no calls. Keeps nothing, so one serves as its own parser."""

    markers: tuple[str, ...] = ()
    stops_after_call = False
    is_thinking = False

    def parser(self, *, streams: bool = True) -> PlainOutput:
        """Itself."""
        del streams
        return self

    def push(self, text: str) -> list[OutputPiece]:
        """All of it, at once."""
        return [Content(text)] if text else []

    def finish(self, *, is_cut: bool) -> list[OutputPiece]:
        """Nothing is ever held back."""
        del is_cut
        return []


PLAIN_OUTPUT: OutputFormat = PlainOutput()
"""For whatever is no conversation."""
