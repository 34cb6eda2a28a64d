"""Bodies with images or videos: how large one may be, and how much of them is held in memory at once.

``limits.max_body_bytes`` holds for text. Images and videos come in base64, which costs little to decode, so a body may be longer
by what they take. What costs time is structure and text, and of those such a body has no more than any other.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from litestar.types import Scope

from machd.errors import BodyTooLargeError, TooManyInFlightError

MAX_MEDIA_BODY_BYTES = 67_108_864
"""Bytes of one body with images or videos, whatever the settings allow."""

MAX_HELD_BYTES = 4 * MAX_MEDIA_BODY_BYTES
"""Bytes of all bodies above ``limits.max_body_bytes`` that are read, decoded or processed at once."""

_BASE64 = (string.ascii_letters + string.digits + "+/=").encode()
_LEASE_KEY = "machd_body_lease"


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The bounds of one body.

    Attributes:
        max_text_bytes: Without the base64 of images and videos: ``limits.max_body_bytes``.
        max_bytes: Of the whole body.
    """

    max_text_bytes: int
    max_bytes: int

    @classmethod
    def of(cls, max_body_bytes: int, *, max_images: int, max_image_bytes: int) -> BodyLimit:
        """Return the bounds of a body with so many images and videos of so many bytes each."""
        wanted = max_body_bytes + max_images * -(-max_image_bytes // 3) * 4
        return cls(max_body_bytes, max(max_body_bytes, min(wanted, MAX_MEDIA_BODY_BYTES)))

    def too_large(self) -> BodyTooLargeError:
        """Return the refusal of a body that is longer than ``max_bytes``."""
        if self.max_bytes == self.max_text_bytes:
            return BodyTooLargeError("the body is longer than limits.max_body_bytes")
        return BodyTooLargeError(
            f"the body has more than {self.max_bytes} bytes, the most that a request with images or "
            "videos may have; send fewer or smaller ones"
        )

    def check_text(self, text_bytes: int) -> None:
        """Raise BodyTooLargeError if the body without its images and videos is beyond its bound."""
        if text_bytes > self.max_text_bytes:
            raise BodyTooLargeError(
                "without its images and videos the body is longer than limits.max_body_bytes"
            )


class HeldBodies:
    """Bytes of large bodies that are in memory, whichever settings they came under."""

    def __init__(self) -> None:
        self.held_bytes = 0


class BodyLease:
    """The part of one request in :class:`HeldBodies`.

    Attributes:
        outlasts_start: The response starts before the handler is done with the body.
    """

    def __init__(self, bodies: HeldBodies) -> None:
        self.outlasts_start = False
        self._bodies = bodies
        self._held_bytes = 0

    def grow_to(self, body_bytes: int) -> None:
        """Hold so many bytes; TooManyInFlightError if all requests together would hold over ``MAX_HELD_BYTES``."""
        added = max(0, body_bytes - self._held_bytes)
        if self._bodies.held_bytes + added > MAX_HELD_BYTES:
            raise TooManyInFlightError(
                f"the large bodies of other requests have {self._bodies.held_bytes - self._held_bytes} "
                f"bytes, and all together may have {MAX_HELD_BYTES}; try again later"
            )
        self._bodies.held_bytes += added
        self._held_bytes += added

    def release(self) -> None:
        """Hold nothing any more."""
        self._bodies.held_bytes -= self._held_bytes
        self._held_bytes = 0


def lend(scope: Scope, bodies: HeldBodies) -> BodyLease:
    """Give a request its lease; the caller releases it."""
    lease = BodyLease(bodies)
    scope.setdefault("state", {})[_LEASE_KEY] = lease
    return lease


def lease_of(scope: Scope) -> BodyLease:
    """Return the lease that the gate gave the request."""
    lease = scope["state"][_LEASE_KEY]
    assert isinstance(lease, BodyLease), "the gate writes nothing else"
    return lease


def structure_bytes(piece: bytes) -> int:
    """Count the bytes that no base64 has: brackets, quotes, commas and spaces of JSON among them."""
    return len(piece.translate(None, _BASE64))
