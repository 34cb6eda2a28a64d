"""Places in a conversation: which message a token of its prompt belongs to, and which character of it.

The conversation is rendered once more with marks in the texts of messages, in calls and in tools. The places are told only if that
text, without its marks, is the prompt: a template may do anything with a text. So they are exact or unknown. It costs a second
rendering, and is done only where a client asks.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from machd.engine.protocol.media import MediaSpan
from machd.errors import InvalidRequestError
from machd.reading.prompt_marks import (
    Marks,
    Messages,
    Span,
    SpanReader,
    Tools,
    ToolSpans,
    marked_calls,
    marked_text,
    marked_tools,
    tool_spans,
)
from machd.request.media import media_of

_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""

_CONTINUATIONS = frozenset(bytes([one]) for one in _CONTINUATION_BYTES)


class PromptPart(StrEnum):
    """A part of a prompt."""

    MESSAGE = "message"
    TOOLS = "tools"
    TEMPLATE = "template"
    TEXT = "text"
    """The prompt of a text completion."""


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """A place in a conversation or a text.

    Attributes:
        message_index: Index in the request of a message, which it is; of other parts, of the first message that ends behind
            them. None behind all, and for a message that is in another field of the request.
        role: Its role.
        character: Characters of the message's text, or of the prompt of a text completion, before the place; None for other
            parts, and in an image, a video, a thought or a call.
        tool_index: Of the tools, which one it is.
    """

    part: PromptPart
    message_index: int | None = None
    role: str | None = None
    character: int | None = None
    tool_index: int | None = None


class Places(Protocol):
    """The places of a prompt's tokens."""

    def at(self, tokens: int) -> PromptPlace | None:
        """Return the place behind so many tokens; None where it is not known."""
        ...


class PromptPlaces:
    """The places of a rendered conversation's tokens."""

    def __init__(
        self,
        roles: Sequence[str],
        indices: Sequence[int | None],
        spans: Sequence[Span],
        tools: ToolSpans,
        characters: array[int],
    ) -> None:
        """Take what :func:`prompt_places` found.

        Args:
            roles: Roles of the conversation's messages.
            indices: Their indices in the request.
            spans: Their parts, in order.
            tools: Where the prompt has tools.
            characters: Characters of the prompt before each token.
        """
        self._roles = roles
        self._indices = indices
        self._spans = spans
        self._stops = [one.stop for one in spans]
        self._tools = tools
        self._characters = characters

    def at(self, tokens: int) -> PromptPlace | None:
        """Return the place behind so many tokens; None where it is not known."""
        at = self._characters[tokens]
        first = bisect_right(self._stops, at)
        following = self._spans[first] if first < len(self._spans) else None
        if following is not None and at >= following.start:
            if following.number is None:
                return None
            skipped = following.skipped
            character = None if skipped is None else at - following.start + skipped
            return self._of(PromptPart.MESSAGE, following.number, character)
        number = next((one.number for one in self._spans[first:] if one.number is not None), None)
        tool_index = self._tools.index(at)
        if tool_index is None:
            return None
        if tool_index < 0:
            return self._of(PromptPart.TEMPLATE, number)
        return replace(self._of(PromptPart.TOOLS, number), tool_index=tool_index)

    def _of(
        self, part: PromptPart, number: int | None, character: int | None = None
    ) -> PromptPlace:
        if number is None:
            return PromptPlace(part)
        return PromptPlace(part, self._indices[number], self._roles[number], character)


class MediaPlaces:
    """The places of a prompt's images and videos; those of its text are not known."""

    def __init__(
        self,
        messages: Messages,
        spans: Sequence[MediaSpan],
        indices: Sequence[int | None] | None = None,
    ) -> None:
        """Find the message of each, which are in the same order in messages and prompt."""
        numbers = [i for i, one in enumerate(messages) for _ in media_of([one])]
        self._roles = [str(one.get("role")) for one in messages]
        self._indices = range(len(messages)) if indices is None else indices
        self._spans = list(zip(spans, numbers, strict=False))

    def at(self, tokens: int) -> PromptPlace | None:
        """Return the place behind so many tokens; None in a text."""
        for span, number in self._spans:
            if span.start <= tokens < span.stop:
                return PromptPlace(PromptPart.MESSAGE, self._indices[number], self._roles[number])
        return None


class TextPlaces:
    """The places of a text's tokens."""

    def __init__(self, characters: array[int], shift: int, length: int) -> None:
        """Take the characters before each token, and how many more of the text are before them."""
        self._characters = characters
        self._shift = shift
        self._length = length

    @classmethod
    def of(cls, text: str, pieces: Sequence[bytes]) -> TextPlaces | None:
        """Find the places of a text's tokens, of which some of the beginning may be left out.

        The tokenizer may write something in front of the text; None where it changes the text otherwise.

        Args:
            text: The prompt as the client sent it.
            pieces: Bytes of its tokens.
        """
        written, sent = b"".join(pieces), text.encode()
        characters = _characters(pieces)
        if not (written.endswith(sent) or sent.endswith(written)):
            return None
        return cls(characters, len(text) - characters[-1], len(text))

    def at(self, tokens: int) -> PromptPlace:
        """Return the place behind so many tokens."""
        character = min(max(0, self._characters[tokens] + self._shift), self._length)
        return PromptPlace(PromptPart.TEXT, character=character)


def prompt_places(  # noqa: PLR0913 - one argument for each part of a prompt
    messages: Messages,
    kept: Messages,
    text: str,
    pieces: Sequence[bytes],
    *,
    tools: Tools,
    indices: Sequence[int | None] | None = None,
    render: Callable[[Messages, Tools], str],
) -> PromptPlaces | None:
    """Find the places of a prompt's tokens; None where the template or the tokenizer changes texts.

    Args:
        messages: Messages of the conversation.
        kept: Those of them that were rendered.
        text: The prompt.
        pieces: Bytes of its tokens.
        tools: Tools that the prompt shows, in the templates' shape.
        indices: Index of each message in the request; None where they are the request's.
        render: Renders messages and tools.
    """
    if b"".join(pieces) != text.encode():
        return None
    by_identity = {id(one): number for number, one in enumerate(messages)}
    numbers = [by_identity[id(one)] for one in kept]
    name = secrets.token_hex(8)
    texts = [marked_text(one, i, name) for i, one in zip(numbers, kept, strict=True)]
    everything = [marked_calls(one, i, name) for i, one in zip(numbers, texts, strict=True)]
    # Some templates look at the names of calls and tools, and write others for marked ones.
    for marked, shown in ((everything, marked_tools(tools, name)), (texts, tools)):
        try:
            found = Marks.read(render(marked, shown), name)
        except InvalidRequestError:
            continue
        if found.plain == text:
            break
    else:
        return None
    spans = SpanReader(text, messages).read(found.found)
    return PromptPlaces(
        [str(one.get("role")) for one in messages],
        range(len(messages)) if indices is None else indices,
        spans,
        tool_spans(found, len(tools), spans),
        _characters(pieces),
    )


def _characters(pieces: Sequence[bytes]) -> array[int]:
    """Return the whole characters before each token, and those of all tokens."""
    characters, begun = array("L"), 0
    for piece in pieces:
        # A token may end a character that began before it.
        characters.append(begun - (begun > 0 and piece[:1] in _CONTINUATIONS))
        begun += len(piece.translate(None, _CONTINUATION_BYTES))
    characters.append(begun)
    return characters
