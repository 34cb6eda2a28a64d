"""A request's body: bytes that arrive in time and are meant as JSON."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Any

from litestar import Request
from litestar.exceptions import InternalServerException

from machd.errors import (
    BodyTimeoutError,
    ClientDisconnectedError,
    InvalidRequestError,
    UnsupportedMediaTypeError,
)
from machd.http.large_bodies import BodyLimit, lease_of, structure_bytes

_JSON = "application/json"
_UNSAID = frozenset({"", "application/x-www-form-urlencoded"})
"""What a client sends that does not say what its body is: the second is what curl writes unasked."""

_PAGE_HEADERS = ("origin", "sec-fetch-site")
"""Headers that a browser writes beside every body, and a page cannot take away."""

_GZIP = frozenset({"gzip", "x-gzip"})
_GZIP_WINDOW_BITS = 16 + zlib.MAX_WBITS
_INFLATED_PIECE_BYTES = 262_144
"""Inflated in one turn of the event loop."""


async def read_json(
    request: Request[Any, Any, Any], *, timeout_s: float, limit: BodyLimit | None = None
) -> bytes:
    """Read a body that is meant as JSON; not decoded yet.

    Without ``limit`` the application's own holds, and the body has to say that it is JSON and has no encoding.

    Raises:
        BodyTooLargeError: It is longer than its limit.
        TooManyInFlightError: It is a large one, and others leave it no room.
        UnsupportedMediaTypeError: It says that it is something else, or is compressed otherwise than by gzip.
        InvalidRequestError: It is no gzip although it says so.
        BodyTimeoutError: It did not arrive in time.
        ClientDisconnectedError: The client left before it had sent everything.
    """
    _check_media_type(request, is_strict=limit is None)
    encoding = request.headers.get("content-encoding", "identity").lower()
    is_gzip = encoding in _GZIP and limit is not None
    if encoding != "identity" and not is_gzip:
        raise UnsupportedMediaTypeError(
            "send the body without a Content-Encoding" + ("" if limit is None else ", or with gzip")
        )
    try:
        async with asyncio.timeout(timeout_s):
            if limit is None:
                return await request.body()
            return await _limited(request, limit, is_gzip=is_gzip)
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive within limits.client_stall_timeout_s ({timeout_s:g} s)"
        ) from None
    except InternalServerException:
        # The framework's word for a client that left before it had sent everything.
        raise ClientDisconnectedError("the client left while sending the body") from None


def _check_media_type(request: Request[Any, Any, Any], *, is_strict: bool) -> None:
    """Refuse a body that is not meant as JSON.

    A page may send a body without a type, or a form, to any server without asking that server first. So what comes
    from a browser has to say ``application/json``, which a page has to ask for.

    Raises:
        UnsupportedMediaTypeError: It is.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    has_to_say = is_strict or any(name in request.headers for name in _PAGE_HEADERS)
    if media_type != _JSON and (has_to_say or media_type not in _UNSAID):
        raise UnsupportedMediaTypeError(
            f"send the body with the header Content-Type: {_JSON}; with curl, add "
            f"-H 'Content-Type: {_JSON}'"
        )


async def _limited(request: Request[Any, Any, Any], limit: BodyLimit, *, is_gzip: bool) -> bytes:
    """Read a body, inflated, and refuse it as soon as it is seen to be too long.

    Raises:
        BodyTooLargeError, TooManyInFlightError, InvalidRequestError: As for :func:`read_json`.
    """
    if (request.content_length or 0) > limit.max_bytes:
        raise limit.too_large()
    pieces: list[bytes] = []
    total_bytes = text_bytes = 0
    received = request.stream()
    async for piece in _inflated(received, limit) if is_gzip else received:
        pieces.append(piece)
        total_bytes += len(piece)
        if total_bytes > limit.max_bytes:
            raise limit.too_large()
        if limit.max_bytes > limit.max_text_bytes:
            text_bytes += structure_bytes(piece)
            limit.check_text(text_bytes)
        if total_bytes > limit.max_text_bytes:
            lease_of(request.scope).grow_to(total_bytes)
    return b"".join(pieces)


async def _inflated(received: AsyncIterator[bytes], limit: BodyLimit) -> AsyncIterator[bytes]:
    """Inflate a gzip file piece by piece; the caller bounds what comes out.

    Raises:
        BodyTooLargeError: It is too long even as it is sent, such as one whose name has no end.
        InvalidRequestError: It is damaged, ends too early, or something follows it.
    """
    inflater = zlib.decompressobj(_GZIP_WINDOW_BITS)
    received_bytes = 0
    try:
        async for piece in received:
            received_bytes += len(piece)
            if received_bytes > limit.max_bytes:
                raise limit.too_large()
            rest = piece
            while rest and not inflater.eof:
                yield inflater.decompress(rest, _INFLATED_PIECE_BYTES)
                rest = inflater.unconsumed_tail
                await asyncio.sleep(0)
            if inflater.unused_data or (rest and inflater.eof):
                raise InvalidRequestError("The body goes on behind the end of its gzip file")
        yield inflater.flush()
    except zlib.error:
        raise InvalidRequestError(
            "The body is no gzip file, as its Content-Encoding says"
        ) from None
    if not inflater.eof:
        raise InvalidRequestError("The body's gzip file ends too early")
