"""The envelope of errors in one dialect, which the gate chooses for each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from machd.errors import MachdError, NotFoundError


def _own_status(error: MachdError) -> int:
    return error.http_status


@dataclass(frozen=True, slots=True)
class Envelope:
    """Shape of a dialect's errors.

    Attributes:
        encode: Writes an error as JSON; the second argument is the request's id.
        not_found: Makes the error for a path at which nothing is served.
        status: HTTP status of an error.
        id_headers: Headers of every answer that carry the request's id.
    """

    encode: Callable[[MachdError, str], bytes]
    not_found: Callable[[str], NotFoundError]
    status: Callable[[MachdError], int] = _own_status
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
