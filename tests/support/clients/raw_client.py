"""An HTTP client on a bare socket, to disconnect, stall or send bytes that no library would."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx
import psutil

from support.clocks.polling import CEILING_S


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """A whole response; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class RawClient:
    """One connection. As a context manager it is closed at the end."""

    def __init__(self, url: str, *, receive_buffer_bytes: int | None = None) -> None:
        """Connect; a tiny receive buffer makes a client that can stall its server."""
        target = httpx.URL(url)
        self._host = f"{target.host}:{target.port}"
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        # Else a byte waits until the system acknowledges the one before, up to 0.2 s: seconds of a test's clock.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(CEILING_S)
        self._socket.connect((target.host, target.port))
        self._ends = self._socket.getpeername(), self._socket.getsockname()
        self.received = b""

    def __enter__(self) -> Self:
        """Already connected."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._socket.sendall(data)

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a request; ``headers`` replace the usual ones, and an empty value removes one."""
        lines = {"Host": self._host, "Content-Length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)

    def post_json(self, path: str, body: Mapping[str, object]) -> None:
        """Send a JSON body."""
        self.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def read_until(self, marker: bytes) -> bytes:
        """Read until ``marker`` has come; returns everything so far."""
        while marker not in self.received:
            self.receive()
        return self.received

    @property
    def is_answered(self) -> bool:
        """Return whether something has come that is not read yet, be it the end."""
        return bool(select.select([self._socket], [], [], 0)[0])

    @property
    def is_open(self) -> bool:
        """Return whether the server has neither closed nor reset the connection."""
        try:
            return not self.is_answered or self._socket.recv(1, socket.MSG_PEEK) != b""
        except ConnectionError:
            return False

    @property
    def is_held(self) -> bool:
        """Return whether a daemon in this process still has the other end, whatever the client has read."""
        held = psutil.Process().net_connections("tcp")
        return any((one.laddr, one.raddr) == self._ends for one in held)

    def read_answer(self) -> RawAnswer:
        """Read one whole response, chunked or not."""
        head, _, _ = self.read_until(b"\r\n\r\n").partition(b"\r\n\r\n")
        status_line, *lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        start = len(head) + 4
        if "content-length" in headers:
            end = start + int(headers["content-length"])
            while len(self.received) < end:
                self.receive()
            body = self.received[start:end]
        else:
            self.read_until(b"\r\n0\r\n\r\n")
            body = self.body
        return RawAnswer(int(status_line.split()[1]), headers, body)

    @property
    def body(self) -> bytes:
        """Return what has been received of a chunked response's body, without the chunks' frames."""
        rest = self.received.partition(b"\r\n\r\n")[2]
        body = b""
        while b"\r\n" in rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            body += rest[:length]
            rest = rest[length + 2 :]
        return body

    def read_to_end(self, timeout_s: float = CEILING_S) -> bytes:
        """Read until the server closes; returns everything."""
        self._socket.settimeout(timeout_s)
        while data := self._socket.recv(65_536):
            self.received += data
        return self.received

    def half_close(self) -> None:
        """Send FIN and go on reading, as ``nc -N`` and some proxies do."""
        self._socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Send RST, as the system does for a client that was killed."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        """Send FIN and read no more, as a client does that leaves in an orderly way; safe to call twice."""
        self._socket.close()

    def receive(self, max_bytes: int = 65_536) -> None:
        """Take in what has come, waiting for something if nothing has."""
        data = self._socket.recv(max_bytes)
        assert data, f"the server closed too early; it had sent {self.received!r}"
        self.received += data
