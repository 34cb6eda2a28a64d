"""Images and videos of a conversation, as a client sent them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class MediaKind(StrEnum):
    """Kind of a part that is no text; the values are the types of parts that chat templates know."""

    IMAGE = "image"
    VIDEO = "video"


@dataclass(frozen=True, slots=True)
class MediaSource:
    """An image or a video; nothing of it is decoded yet.

    Attributes:
        param: The request field that it came from, for errors about it.
        content: The file's bytes (PNG, JPEG, MP4, …); None if ``url`` is to be fetched.
        url: An ``https:`` or ``file:`` URL; None if ``content`` is there.
        fps: Frames to take of each second of a video; None leaves it to the model's processor.
        max_frames: Most frames to take of a video; None leaves it to the model's processor.
    """

    kind: MediaKind
    param: str
    content: bytes | None = field(default=None, repr=False)
    url: str | None = field(default=None, repr=False)
    fps: float | None = None
    max_frames: int | None = None


MEDIA_KEY = "source"
"""Key of a message's part that holds its :class:`MediaSource`: ``{"type": "image", "source": …}``."""


def media_of(messages: Iterable[Mapping[str, object]]) -> list[MediaSource]:
    """Collect the images and videos of template messages, in order."""
    parts = (part for message in messages for part in _parts(message))
    return [one for part in parts if isinstance(one := part.get(MEDIA_KEY), MediaSource)]


def _parts(message: Mapping[str, object]) -> list[Mapping[str, object]]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def message_content(
    pieces: Iterable[str | MediaSource], *, between: str = ""
) -> str | list[dict[str, object]]:
    """Build a template message's content from texts, images and videos in their order.

    Texts side by side become one, with ``between`` between them; empty ones are left out.

    Returns:
        A text where there is neither image nor video, else a list of parts.
    """
    parts: list[dict[str, object]] = []
    texts: list[str] = []
    for piece in pieces:
        if isinstance(piece, MediaSource):
            parts += _text_parts(between.join(texts))
            parts.append({"type": piece.kind.value, MEDIA_KEY: piece})
            texts = []
        elif piece:
            texts.append(piece)
    text = between.join(texts)
    return [*parts, *_text_parts(text)] if parts else text


def without_tool_media(
    messages: Iterable[dict[str, object]],
) -> tuple[list[dict[str, object]], int]:
    """Put ``[image]`` or ``[video]`` in place of what results of tools hold, for a model that takes text only.

    Returns:
        The messages, and how many images and videos were left out.
    """
    kept: list[dict[str, object]] = []
    count = 0
    for message in messages:
        media = media_of([message]) if message.get("role") == "tool" else []
        if media:
            texts = (str(part.get("text", f"[{part['type']}]")) for part in _parts(message))
            message = {**message, "content": "\n".join(texts)}  # noqa: PLW2901 - the message, changed
            count += len(media)
        kept.append(message)
    return kept, count


def _text_parts(text: str) -> list[dict[str, object]]:
    return [{"type": "text", "text": text}] if text else []
