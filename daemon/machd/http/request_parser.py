"""h11's parser of requests, with what RFC 9112 asks of a server beyond it, and an exact bound on heads."""

from __future__ import annotations

import re
from http import HTTPStatus

import h11

MAX_HEAD_BYTES = 16_384
"""Of a request line with its headers, and of a chunked body's trailers."""

_BLANK_LINE = re.compile(rb"\n\r?\n")
_ABSOLUTE_FORM = re.compile(rb"(?i:https?)://(?P<authority>[^/?#]*)(?P<rest>[^#]*)")
_REQUEST_LINE_PATH = re.compile(rb"[A-Za-z]+ (?i:https?://[^/?# ]*)?(?P<path>/[^?# \r\n]*)")
_PATH_BYTES = 512
_TOO_LONG = f"the head of the request has more than {MAX_HEAD_BYTES} bytes"


class RequestParser(h11.Connection):
    """A server's side of one connection.

    Attributes:
        problem: What is wrong with the request; told to the client after :meth:`next_event` has raised.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.problem = "the request cannot be read as HTTP/1.1"
        self._head_begin = b""

    @property
    def path(self) -> str:
        """Path of the last request, as far as it can be read; for the envelope of its errors."""
        match = _REQUEST_LINE_PATH.match(self._head_begin)
        return match["path"].decode("latin-1") if match else ""

    @property
    def is_head_request(self) -> bool:
        """True for a request whose answer has no body."""
        return self._request_method == b"HEAD"  # h11's own, which has no public name for it

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event; the target of a request is in origin form.

        Raises:
            h11.RemoteProtocolError: What the client sends is no request, or none that is taken.
        """
        if self.their_state is h11.IDLE:
            self._check_head()
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
                self.problem = _TOO_LONG
            raise
        if not isinstance(event, h11.Request):
            return event
        names = {name for name, _ in event.headers}
        if {b"content-length", b"transfer-encoding"} <= names:
            # Proxies in front may have taken the other length.
            raise self._refusal("the request has Content-Length beside Transfer-Encoding")
        if event.target.startswith(b"/") or event.target == b"*":
            return event
        absolute = _ABSOLUTE_FORM.fullmatch(event.target)
        if absolute is None:
            raise self._refusal("the target of the request is no path and no URL")
        return _in_origin_form(event, absolute)

    def _check_head(self) -> None:
        """Refuse a head that is too long before it is parsed: 250 kB of short headers take half a second."""
        received = self.trailing_data[0]
        self._head_begin = received[:_PATH_BYTES] or self._head_begin
        if len(received) > MAX_HEAD_BYTES and not _BLANK_LINE.search(received, 0, MAX_HEAD_BYTES):
            raise self._refusal(_TOO_LONG)

    def _refusal(self, problem: str) -> h11.RemoteProtocolError:
        """Return the error, and read nothing more."""
        self.problem = problem
        self._process_error(self.their_role)  # h11's own; it has no public name for it
        return h11.RemoteProtocolError(problem)


def _in_origin_form(request: h11.Request, absolute: re.Match[bytes]) -> h11.Request:
    """Return the request as if its target, a URL, had been sent as a path.

    A server has to take a target in absolute form, as clients of proxies send it, and its host instead of
    the Host header: RFC 9112, section 3.2.2.
    """
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    rest = absolute["rest"]
    return h11.Request(
        method=request.method,
        target=rest if rest.startswith(b"/") else b"/" + rest,
        headers=[(b"host", absolute["authority"]), *headers],
        http_version=request.http_version,
    )
