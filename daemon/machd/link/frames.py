"""Messages on a stream socket: each is four bytes of length, big endian, and so many bytes."""

from __future__ import annotations

import socket

_LENGTH_BYTES = 4

MAX_FRAME_BYTES = (1 << 32) - 1
"""A request's images are its largest part."""


class Frames:
    """One end of a link. One thread may send while another receives."""

    def __init__(self, end: socket.socket) -> None:
        """Take over a connected socket that blocks."""
        self._end = end
        self._incoming = end.makefile("rb")

    def send(self, content: bytes) -> None:
        """Send a message, and wait while the other end has no room for it.

        Raises:
            OSError: The other end is gone.
        """
        assert len(content) <= MAX_FRAME_BYTES, "a message fits a frame"
        self._end.sendall(len(content).to_bytes(_LENGTH_BYTES, "big"))
        self._end.sendall(content)  # not joined to the length: images have no room for a copy

    def receive(self) -> bytes | None:
        """Wait for a message; None once the other end is gone, however it ended."""
        try:
            header = self._incoming.read(_LENGTH_BYTES)
            if len(header) < _LENGTH_BYTES:
                return None
            count = int.from_bytes(header, "big")
            content = self._incoming.read(count)
        except OSError:  # a process that is killed with unread messages resets the connection
            return None
        return content if len(content) == count else None

    def end(self) -> None:
        """Let both ends see that there is nothing more; may be called again, and from any thread."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close the socket; no thread may be using it."""
        self._incoming.close()
        self._end.close()
