"""A conversation's prompt with the keys of its images and videos between the tokens of its text."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from machd.engine.protocol.media import Media, MediaProcessor, MediaSpan
from machd.errors import InvalidRequestError
from machd.request.media import MEDIA_KEY, MediaKind, MediaSource, media_of

Messages = list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class KeyedPrompt:
    """A rendered prompt.

    Attributes:
        text: Text with placeholders.
        keys: Token ids, with keys in the places of images and videos.
        spans: Spans of images and videos, in order.
    """

    text: str
    keys: tuple[int, ...]
    spans: tuple[MediaSpan, ...] = ()


def keyed_prompt(
    messages: Messages,
    decoded: Mapping[int, Media],
    processor: MediaProcessor,
    *,
    render: Callable[[Messages], str],
    encode: Callable[[str], Sequence[int]],
) -> KeyedPrompt:
    """Render a conversation with images and videos, and put their keys in place of its placeholders.

    ``decoded`` is by the identities of sources; ``render`` takes messages without sources.

    Raises:
        InvalidRequestError: The template refuses the messages, leaves an image out, or ends with one.
    """
    media = [decoded[id(source)] for source in media_of(messages)]
    placeholders = _placeholders(media, processor)
    # A client's text that spells a placeholder is no image.
    escapes = {one: f"\ue000{secrets.token_hex(8)}\ue001" for one in dict.fromkeys(placeholders)}
    unwritten = iter(placeholders)
    text = render([_rendered_message(one, processor, escapes, unwritten) for one in messages])
    keys: list[int] = []
    spans: list[MediaSpan] = []
    carried, rest = "", text
    for one, placeholder in zip(media, placeholders, strict=True):
        before, found, rest = rest.partition(placeholder)
        if not found:
            raise InvalidRequestError.at(
                "messages",
                "the model's chat template leaves out an image or video of these messages",
            )
        keys += encode(carried + _restored(before, escapes) + one.text_before)
        spans.append(MediaSpan(len(keys), one))
        keys += one.keys
        carried = one.text_after
    ending = encode(carried + _restored(rest, escapes))
    if not ending:
        raise InvalidRequestError.at(
            "messages", "the prompt ends with an image or video; send a text behind it"
        )
    return KeyedPrompt(_restored(text, escapes), (*keys, *ending), tuple(spans))


def _placeholders(media: Sequence[Media], processor: MediaProcessor) -> list[str]:
    """Return the text that stands for each, which may count those of its kind."""
    counts: Counter[MediaKind] = Counter()
    placeholders: list[str] = []
    for one in media:
        counts[one.kind] += 1
        placeholders.append(processor.placeholder(one.kind, counts[one.kind]))
    return placeholders


def _rendered_message(
    message: dict[str, object],
    processor: MediaProcessor,
    escapes: dict[str, str],
    unwritten: Iterator[str],
) -> dict[str, object]:
    """Return a message for the template, without sources and with escaped placeholders in its text.

    ``escapes`` are by placeholder; ``unwritten`` yields placeholders of this message's and all later sources.
    """
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _escaped(content, escapes)}
    if not isinstance(content, list):
        return message
    parts: list[dict[str, object]] = []
    for part in content:
        source = part.get(MEDIA_KEY)
        if isinstance(source, MediaSource):
            parts.append({"type": str(source.kind)})
        else:
            parts.append({"type": "text", "text": _escaped(str(part.get("text", "")), escapes)})
    if processor.reads_parts:
        return {**message, "content": parts}
    texts = [
        str(part["text"]) if part["type"] == "text" else next(unwritten) + "\n" for part in parts
    ]
    return {**message, "content": "".join(texts)}


def _escaped(text: str, escapes: dict[str, str]) -> str:
    for placeholder, escape in escapes.items():
        text = text.replace(placeholder, escape)
    return text


def _restored(text: str, escapes: dict[str, str]) -> str:
    for placeholder, escape in escapes.items():
        text = text.replace(escape, placeholder)
    return text
