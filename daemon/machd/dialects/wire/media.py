"""Images and videos as clients send them: base64 decoded to bytes, URLs checked and kept.

A ``data:`` URL is decoded to the bytes of its file; ``https:`` and ``file:`` URLs are kept, to be
fetched by :mod:`machd.generations.media_fetch` where the operator allows it. Decoding megabytes takes
milliseconds, so it belongs in a worker thread. No message quotes what a client sent.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Iterator, Sequence
from functools import cache
from types import MappingProxyType
from typing import get_args

from msgspec import Struct, structs

from machd.dialects.wire.bounds import MediaText
from machd.errors import InvalidRequestError
from machd.request.media import MediaKind, MediaSource

MAX_URL_CHARS = 8192
"""Characters of a URL that is fetched."""

_MAX_HEADER_CHARS = 256
"""Characters of a data: URL before its comma: the media type and its parameters."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}):")
_PRINTABLE_ASCII = re.compile(r"[!-~]+")
_SVG = "image/svg+xml"
_NOUNS = MappingProxyType({MediaKind.IMAGE: "an image", MediaKind.VIDEO: "a video"})
_GOOD_TYPES = MappingProxyType(
    {
        MediaKind.IMAGE: "image/png, image/jpeg or image/webp",
        MediaKind.VIDEO: "video/mp4 or video/webm",
    }
)
_EXAMPLES = MappingProxyType(
    {MediaKind.IMAGE: "data:image/png;base64,", MediaKind.VIDEO: "data:video/mp4;base64,"}
)


def media_from_url(
    url: str,
    kind: MediaKind,
    *,
    param: str,
    fps: float | None = None,
    max_frames: int | None = None,
) -> MediaSource:
    """Read a URL; ``kind`` is what the field that holds it is for.

    Raises:
        InvalidRequestError: The scheme is not taken, a data: URL cannot be decoded or has the media
            type of something else, or another URL is too long or has characters that no URL has.
    """
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match is not None else ""
    content: bytes | None = None
    if scheme == "data":
        content = _data_url_content(url[len("data:") :], kind, param=param)
    else:
        _check_fetchable(url, scheme, kind, param=param)
    return MediaSource(
        kind,
        param,
        content=content,
        url=url if content is None else None,
        fps=fps,
        max_frames=max_frames,
    )


def media_from_base64(
    data: str, kind: MediaKind, *, param: str, media_type: str = ""
) -> MediaSource:
    """Read a file that is sent as standard base64 with its padding.

    ``media_type`` is as the client names it; empty where it does not.

    Raises:
        InvalidRequestError: It is not base64, it is empty, or the media type is that of something
            else.
    """
    _check_media_type(media_type, kind, param=param)
    return MediaSource(kind, param, content=_decoded(data, param=param))


def _check_fetchable(url: str, scheme: str, kind: MediaKind, *, param: str) -> None:
    if scheme == "http":
        raise InvalidRequestError.at(
            param,
            "http: URLs are not fetched, as their answers can be altered on the way; send "
            "an https: URL, or the file itself in a data: URL",
        )
    if scheme not in ("https", "file"):
        raise InvalidRequestError.at(
            param,
            f"not a URL of a kind that is taken; send the file itself as "
            f'"{_EXAMPLES[kind]}…", or an https: or file: URL where the server allows it',
        )
    if len(url) > MAX_URL_CHARS:
        raise InvalidRequestError.at(
            param,
            f"a URL that is fetched may have {MAX_URL_CHARS} characters; send the file "
            "itself in a data: URL",
        )
    if _PRINTABLE_ASCII.fullmatch(url) is None:
        raise InvalidRequestError.at(
            param, "a URL has neither spaces nor characters beyond ASCII; percent-encode them"
        )


def _data_url_content(rest: str, kind: MediaKind, *, param: str) -> bytes:
    """Decode what follows ``data:`` (RFC 2397): a media type, parameters, ``;base64``, a comma, data."""
    comma = rest.find(",", 0, _MAX_HEADER_CHARS + 1)
    if comma < 0:
        raise InvalidRequestError.at(
            param,
            f"the data: URL has no comma in its first {_MAX_HEADER_CHARS} characters; "
            f'begin it with "{_EXAMPLES[kind]}"',
        )
    media_type, *parameters = rest[:comma].split(";")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise InvalidRequestError.at(
            param,
            f"a data: URL is taken in base64 only, not percent-encoded; begin it with "
            f'"{_EXAMPLES[kind]}"',
        )
    _check_media_type(media_type, kind, param=param)
    return _decoded(rest[comma + 1 :], param=param)


def _check_media_type(media_type: str, kind: MediaKind, *, param: str) -> None:
    """Refuse the media type of something else; the file itself tells which image it is."""
    named = media_type.partition(";")[0].strip().lower()
    if named == _SVG:
        raise InvalidRequestError.at(
            param, f"{_SVG} has no pixels; draw it and send {_GOOD_TYPES[MediaKind.IMAGE]}"
        )
    if named and not named.startswith(f"{kind}/"):
        raise InvalidRequestError.at(
            param, f"the media type is not that of {_NOUNS[kind]}; send {_GOOD_TYPES[kind]}"
        )


def _decoded(data: str, *, param: str) -> bytes:
    try:
        content = a2b_base64(data, strict_mode=True)
    except ValueError:  # binascii.Error is one, and so is what a character beyond ASCII raises
        raise InvalidRequestError.at(
            param,
            "not valid base64; send the standard alphabet with its padding and without line breaks",
        ) from None
    if not content:
        raise InvalidRequestError.at(param, "there is no data; send the bytes of a file in base64")
    return content


def media_characters(body: Struct) -> int:
    """Count the characters of a decoded body's fields that hold images and videos."""
    total, rest = 0, [body]
    while rest:
        one = rest.pop()
        for name, holds_media in _media_fields(type(one)):
            for value in _values(getattr(one, name)):
                if isinstance(value, Struct):
                    rest.append(value)
                elif holds_media and isinstance(value, str):
                    total += len(value)
    return total


@cache
def _media_fields(type_: type[Struct]) -> Sequence[tuple[str, bool]]:
    """Return a type's fields, each with whether it holds media; the types of the wire are few."""
    # Reading the annotations takes two milliseconds for a request for a chat.
    return [(field.name, _holds_media(field.type)) for field in structs.fields(type_)]


def _values(value: object) -> Iterator[object]:
    if isinstance(value, list):
        for one in value:
            yield from _values(one)
    else:
        yield value


def _holds_media(annotation: object) -> bool:
    """Return whether a field's type allows the text of an image or a video."""
    return annotation == MediaText or any(map(_holds_media, get_args(annotation)))
