"""Pages in front of an API: browsers get a page at ``/`` and its files below ``/console/``, programs what they had."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import cast

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from machd.console.files import PageFile, read_files

_BELOW = "/console/"

_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""No inline code, nothing from elsewhere, and no frame of another page around it (CSP level 3)."""

HEADERS: Sequence[tuple[bytes, bytes]] = (
    (b"content-security-policy", _CONTENT_SECURITY_POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),  # without any, a form is of origin null
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),  # asked for again each time, and sent only if it has changed
    (b"vary", b"accept"),
)
"""Of every page and file."""


class Pages:
    """Answers browsers, and hands everything else to the API."""

    def __init__(self, app: ASGIApp, folder: str) -> None:
        """Serve the page in ``folder`` of :mod:`machd.console.files`, with what all pages share."""
        self._app = app
        self._files = read_files(folder, "shared", "vendor")
        self._index = self._files[f"{folder}/index.html"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a page or a file; pass any other on."""
        file = self._file(scope) if scope["type"] == ScopeType.HTTP else None
        if file is None:
            await self._app(scope, receive, send)
        else:
            await _send_file(file, cast(HTTPScope, scope), send)

    def _file(self, scope: HTTPScope) -> PageFile | None:
        if scope["method"] not in {"GET", "HEAD"}:
            return None
        if scope["path"] == "/":
            return self._index if _takes_pages(scope) else None
        if scope["path"].startswith(_BELOW):
            return self._files.get(scope["path"].removeprefix(_BELOW))
        return None


def _takes_pages(scope: HTTPScope) -> bool:
    """Return True if the client names HTML among what it takes, as browsers do and programs do not."""
    accepted = ",".join(_values(scope, b"accept")).split(",")
    return any(one.partition(";")[0].strip().lower() == "text/html" for one in accepted)


def _values(scope: HTTPScope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for one, value in scope["headers"] if one == name]


async def _send_file(file: PageFile, scope: HTTPScope, send: Send) -> None:
    known = ",".join(_values(scope, b"if-none-match")).split(",")
    is_known = file.etag in {one.strip().removeprefix("W/") for one in known}
    status = HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK
    headers = [(b"etag", file.etag.encode()), *HEADERS]
    if not is_known:
        headers += [
            (b"content-type", file.media_type.encode()),
            (b"content-length", str(len(file.content)).encode()),
        ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    is_sent = not is_known and scope["method"] != "HEAD"
    body = file.content if is_sent else b""
    await send({"type": "http.response.body", "body": body, "more_body": False})
