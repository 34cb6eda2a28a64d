"""Places in a conversation: which message a token of its prompt belongs to, and which character of it.

The conversation is rendered once more with marks around the texts of messages. The places are told only if that text, without
its marks, is the prompt: a template may do anything with a text. So they are exact or unknown. It costs a second rendering, and is done
only where a client asks.
"""

from __future__ import annotations

import re
import secrets
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from machd.engine.protocol.media import MediaSpan
from machd.request.media import media_of

Messages = list[dict[str, object]]

_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
"""Bytes of UTF-8 that begin no character."""


class PromptPart(StrEnum):
    """A part of a prompt."""

    MESSAGE = "message"
    TOOLS = "tools"
    TEMPLATE = "template"


@dataclass(frozen=True, slots=True)
class PromptPlace:
    """A place in a conversation.

    Attributes:
        message_index: Of a message, which it is; of other parts, the first message that ends behind them. None behind all.
        role: Its role.
        character: Characters of the message's text before the place; None for other parts, and in an image or video.
        tool_index: Of the tools, which one it is.
    """

    part: PromptPart
    message_index: int | None = None
    role: str | None = None
    character: int | None = None
    tool_index: int | None = None


class Places(Protocol):
    """Places of a prompt's tokens in its conversation."""

    def at(self, tokens: int) -> PromptPlace | None:
        """Return the place behind so many tokens; None where it is not known."""
        ...


@dataclass(frozen=True, slots=True)
class _Span:
    """A text of a message in the prompt, in characters.

    Attributes:
        skipped: Characters of the message's text before it.
    """

    start: int
    stop: int
    message_index: int
    skipped: int = 0


class PromptPlaces:
    """The places of a rendered conversation's tokens."""

    def __init__(
        self,
        messages: Messages,
        spans: Sequence[_Span],
        tools: Sequence[int],
        characters: array[int],
    ) -> None:
        """Take what :func:`prompt_places` found.

        Args:
            messages: Messages of the request.
            spans: Their texts, in order.
            tools: Where the prompt names each tool, in characters, and where the last one ends; empty without tools.
            characters: Characters of the prompt before each token.
        """
        self._messages = messages
        self._spans = spans
        self._tools = tools
        self._characters = characters

    def at(self, tokens: int) -> PromptPlace:
        """Return the place behind so many tokens."""
        at = self._characters[tokens]
        following = next((one for one in self._spans if at < one.stop), None)
        if following is None:
            place = PromptPlace(PromptPart.TEMPLATE)
        elif at >= following.start:
            character = at - following.start + following.skipped
            return self._of(PromptPart.MESSAGE, following.message_index, character)
        else:
            place = self._of(PromptPart.TEMPLATE, following.message_index)
        if not self._tools or not self._tools[0] <= at < self._tools[-1]:
            return place
        tool_index = bisect_right(self._tools, at) - 1
        return PromptPlace(PromptPart.TOOLS, place.message_index, place.role, tool_index=tool_index)

    def _of(self, part: PromptPart, index: int, character: int | None = None) -> PromptPlace:
        return PromptPlace(part, index, str(self._messages[index].get("role")), character)


class MediaPlaces:
    """The places of a prompt's images and videos; those of its text are not known."""

    def __init__(self, messages: Messages, spans: Sequence[MediaSpan]) -> None:
        """Find the message of each, which are in the same order in messages and prompt."""
        indices = [i for i, one in enumerate(messages) for _ in media_of([one])]
        self._messages = messages
        self._spans = list(zip(spans, indices, strict=False))

    def at(self, tokens: int) -> PromptPlace | None:
        """Return the place behind so many tokens; None in a text."""
        for span, index in self._spans:
            if span.start <= tokens < span.stop:
                role = str(self._messages[index].get("role"))
                return PromptPlace(PromptPart.MESSAGE, index, role)
        return None


def prompt_places(
    messages: Messages,
    kept: Messages,
    text: str,
    pieces: Sequence[bytes],
    *,
    tools: Sequence[Mapping[str, object]],
    render: Callable[[Messages], str],
) -> PromptPlaces | None:
    """Find the places of a prompt's tokens; None where the template or the tokenizer changes texts.

    Args:
        messages: Messages of the request.
        kept: Those of them that were rendered.
        text: The prompt.
        pieces: Bytes of its tokens.
        tools: Tools that the prompt shows, in the templates' shape.
        render: Renders messages.
    """
    if b"".join(pieces) != text.encode():
        return None
    indices = {id(one): index for index, one in enumerate(messages)}
    numbers = [indices[id(one)] for one in kept]
    name = secrets.token_hex(8)
    marked = render([_marked(one, i, name) for i, one in zip(numbers, kept, strict=True)])
    spans, plain = _spans(marked, name, messages)
    if plain != text:
        return None
    lengths = (len(one.translate(None, _CONTINUATION_BYTES)) for one in pieces)
    characters = array("L", [0])
    for length in lengths:
        characters.append(characters[-1] + length)
    return PromptPlaces(messages, spans, _tool_starts(text, spans, tools), characters)


def _marked(message: dict[str, object], index: int, name: str) -> dict[str, object]:
    """Return a message with marks around its text, inside the white space that templates strip."""
    content = message.get("content")
    if not isinstance(content, str) or not (said := content.strip()):
        return message
    start = content.index(said)
    marks = [f"\ue000{name}{one}{index}\ue001" for one in "se"]
    ending = content[start + len(said) :]
    return {**message, "content": f"{content[:start]}{marks[0]}{said}{marks[1]}{ending}"}


def _spans(marked: str, name: str, messages: Messages) -> tuple[list[_Span], str]:
    """Return the marked texts, and the text without marks. Of a text whose beginning was cut off nothing is told."""
    spans: list[_Span] = []
    starts: dict[int, int] = {}
    is_start = False
    plain: list[str] = []
    length = 0
    mark = re.compile(f"\ue000{name}([se])(\\d+)\ue001")
    for number, piece in enumerate(mark.split(marked)):
        if number % 3 == 0:
            plain.append(piece)
            length += len(piece)
        elif number % 3 == 1:
            is_start = piece == "s"
        elif is_start:
            starts[int(piece)] = length
        elif (start := starts.get(int(piece))) is not None:
            content = str(messages[int(piece)]["content"])
            spans.append(_Span(start, length, int(piece), len(content) - len(content.lstrip())))
    return spans, "".join(plain)


def _tool_starts(
    text: str, spans: Sequence[_Span], tools: Sequence[Mapping[str, object]]
) -> list[int]:
    """Return where the template's own text has each tool, by its name, in order, and where the last one ends."""
    gaps = zip(
        [0, *(one.stop for one in spans)], [*(one.start for one in spans), len(text)], strict=True
    )
    for start, stop in gaps:
        found: list[int] = []
        at = start
        for tool in tools:
            function = tool.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            at = text.find(f'"{name}"', at, stop)
            if at < 0:
                break
            begins = max(start, text.rfind("{", start, at))
            around = text.rfind("{", start, begins)
            is_wrapped = around >= 0 and '"function":' in text[around:begins]
            found.append(around if is_wrapped else begins)
        if found and len(found) == len(tools):
            return [*found, text.rfind("}", start, stop) + 1]
    return []
