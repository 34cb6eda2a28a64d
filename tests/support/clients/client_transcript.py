"""The wire's bytes between a client library and the daemon, kept as a golden file.

A small proxy stands between the two, so every library is recorded the same way and runs exactly
as it does for its users. ``MACHD_UPDATE_GOLDEN=1`` writes the files instead of comparing them.
"""

from __future__ import annotations

import contextlib
import difflib
import http.client
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from support.clients.transcript_shape import exchange_shape, laid_out
from support.clocks.polling import CEILING_S

_DIRECTORY = Path(__file__).parents[2] / "golden" / "clients"
_UPDATES = os.environ.get("MACHD_UPDATE_GOLDEN") == "1"
_OF_ONE_HOP = {"host", "connection", "transfer-encoding", "date", "server"}


@dataclass
class Exchange:
    """A request and its answer, as bytes."""

    method: str
    path: str
    request: bytes
    status: int = 0
    content_type: str = ""
    answer: bytearray = field(default_factory=bytearray)


@dataclass
class Wire:
    """A proxy's address and what went through it so far."""

    url: str
    exchanges: list[Exchange]


@contextmanager
def transcript(url: str, name: str, *, is_scripted: bool) -> Iterator[Wire]:
    """Record a conversation with the daemon at ``url``; at the end compare it with its file.

    Args:
        url: The daemon.
        name: The golden file's, without directory and extension.
        is_scripted: Whether the answers are the same everywhere. What a real model says depends
            on the machine's BLAS, so its texts and token counts are left out.
    """
    target = urlsplit(url)
    exchanges: list[Exchange] = []

    class Handler(_Handler):
        upstream = (target.hostname or "", target.port or 0)
        recorded = exchanges

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = False  # closing waits for the last bytes of every answer
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="test-wire")
        thread.start()
        try:
            yield Wire(f"http://127.0.0.1:{server.server_port}", exchanges)
        finally:
            server.shutdown()
            thread.join()
    _check(name, laid_out(exchange_shape(exchanges, is_scripted=is_scripted)) + "\n")


def _check(name: str, text: str) -> None:
    path = _DIRECTORY / f"{name}.json"
    if _UPDATES:
        path.write_text(text)
    expected = path.read_text() if path.exists() else ""
    difference = difflib.unified_diff(
        expected.splitlines(), text.splitlines(), str(path), "what went over the wire", lineterm=""
    )
    assert text == expected, "MACHD_UPDATE_GOLDEN=1 accepts this:\n" + "\n".join(difference)


class _Handler(BaseHTTPRequestHandler):
    """Passes a request on and its answer back, piece by piece, and keeps both."""

    protocol_version = "HTTP/1.1"
    upstream: ClassVar[tuple[str, int]]
    recorded: ClassVar[list[Exchange]]

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        exchange = Exchange(self.command, self.path, body)
        self.recorded.append(exchange)
        connection = http.client.HTTPConnection(*self.upstream, timeout=CEILING_S)
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body, dict(_passed(self.headers.items())))
            self._pass_back(exchange, connection.getresponse())

    def _pass_back(self, exchange: Exchange, answer: http.client.HTTPResponse) -> None:
        exchange.status = answer.status
        exchange.content_type = answer.headers.get("content-type", "")
        self.send_response_only(answer.status)
        for header in _passed(answer.headers.items()):
            self.send_header(*header)
        self.send_header("Connection", "close")
        self.end_headers()
        while piece := answer.read1(65536):
            exchange.answer += piece
            with contextlib.suppress(ConnectionError):  # a client may leave after the last event
                self.wfile.write(piece)

    do_GET = do_POST = do_DELETE = _pass_on  # noqa: N815 - the base class's names


def _passed(headers: Any) -> Iterator[tuple[str, str]]:
    return ((name, value) for name, value in headers if name.lower() not in _OF_ONE_HOP)
