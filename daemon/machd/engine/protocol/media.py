"""Images and videos in a prompt, as plain data: the tokens that stand for them, and what is computed of them.

A prompt is a sequence of keys. The key of a text token is its id. The keys of an image are numbers above every id, made of
the image's content hash, so that whatever compares prompts (prefix index, coalescing, look-up of draft tokens) tells images apart by their
content and knows nothing of them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from machd.request.media import MediaKind, MediaSource

FIRST_MEDIA_KEY = 1 << 63
"""Keys from here on stand for positions of images and videos; token ids are below."""


class PlainArray:
    """An array without a library: bytes in C order, which may lie in the message that they came with.

    No dataclass, so that msgspec leaves it to the link, which sends the content beside the message.
    """

    shape: tuple[int, ...]
    dtype: str
    content: memoryview

    def __init__(self, shape: tuple[int, ...], dtype: str, content: memoryview) -> None:
        self.shape = shape
        self.dtype = dtype
        self.content = content


@dataclass(frozen=True, eq=False)
class Media:
    """One image or video, decoded and processed for one model.

    Attributes:
        digest: Hash of the file's bytes, of how it was processed, and of the namespace that may share it.
        token_ids: The model's tokens that stand for it, those that frame it included.
        arrays: What the model's encoder takes besides the token ids, such as ``pixel_values``.
        text_before: Text that belongs in front of them, and is tokenised with the prompt's.
        text_after: Text that belongs behind them.
    """

    kind: MediaKind
    digest: bytes
    token_ids: tuple[int, ...]
    arrays: Mapping[str, PlainArray] = field(repr=False)
    text_before: str = ""
    text_after: str = ""

    @cached_property
    def keys(self) -> tuple[int, ...]:
        """One key for each of its tokens: 63 bits of the digest's expansion, above every token id."""
        words = array("Q", hashlib.shake_256(self.digest).digest(8 * len(self.token_ids)))
        return tuple(word | FIRST_MEDIA_KEY for word in words)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(len(one.content) for one in self.arrays.values())


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A media's place in a prompt."""

    start: int
    media: Media

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.start + len(self.media.token_ids)


def spans_between(spans: Sequence[MediaSpan], start: int, stop: int) -> Sequence[MediaSpan]:
    """Return the spans that have a position from ``start`` up to ``stop``."""
    return [span for span in spans if span.start < stop and span.stop > start]


def token_ids_of(keys: Sequence[int], spans: Sequence[MediaSpan], start: int = 0) -> list[int]:
    """Replace the keys of images and videos in a stretch of a prompt from ``start`` on by the model's tokens."""
    token_ids = list(keys)
    for span in spans_between(spans, start, start + len(keys)):
        begin, end = max(span.start, start), min(span.stop, start + len(keys))
        token_ids[begin - start : end - start] = span.media.token_ids[
            begin - span.start : end - span.start
        ]
    return token_ids


@dataclass(frozen=True, slots=True)
class MediaBounds:
    """Limits of an image, or of a video's frames; a longer video is sampled more thinly. The time includes processing."""

    max_pixels: int
    max_frames: int
    max_decode_s: float


class MediaEncodingError(Exception):
    """The model's encoder failed on an image or video; the row that has it ends."""


class MediaProcessor(Protocol):
    """Decodes images and videos, and processes them for the served model. Every method may be called from any thread."""

    def placeholder(self, kind: MediaKind, number: int) -> str:
        """Return the text that stands for a rendered prompt's ``number``-th one of its kind, from 1.

        Raises:
            InvalidRequestError: The model takes none of this kind.
        """
        ...

    @property
    def reads_parts(self) -> bool:
        """True if the chat template writes placeholders itself, for parts of a message's content."""
        ...

    def process(
        self,
        source: MediaSource,
        bounds: MediaBounds,
        namespace: str,
        is_wanted: Callable[[], bool] | None = None,
    ) -> Media:
        """Decode and process one file, or take what is known of it.

        Only requests of one namespace share what is computed of a file. Work on it ends once it is not wanted.

        Raises:
            InvalidRequestError: The file cannot be used; the message says why.
            OverloadedError: The system has no room for the process that decodes, or other requests hold too much.
        """
        ...

    def close(self) -> None:
        """End the process, and drop what is known."""
        ...
