"""Messages on a stream socket: each has several parts, and the first part describes the others.

A message begins with the number of its parts and the length of each, all in four bytes, big endian.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

_NUMBER_BYTES = 4

MAX_PART_BYTES = (1 << 32) - 1
"""Largest size of a part; images of requests are the largest."""

Part: TypeAlias = bytes | bytearray | memoryview


class Frames:
    """One end of a link. One thread may send while another receives."""

    def __init__(self, end: socket.socket) -> None:
        """Take over a connected, blocking socket."""
        self._end = end
        self._incoming = end.makefile("rb")

    def send(self, parts: Sequence[Part]) -> None:
        """Send a message; wait while the socket's buffer is full.

        Raises:
            OSError: The other end is gone.
        """
        lengths = [len(one) for one in parts]
        assert max(lengths) <= MAX_PART_BYTES, "a part fits a frame"
        self._end.sendall(struct.pack(f">{1 + len(parts)}I", len(parts), *lengths))
        for part in parts:  # sent one by one: there may be no memory for a joined copy
            self._end.sendall(part)

    def receive(self) -> list[bytearray] | None:
        """Wait for a message; None once the other end is closed or reset."""
        try:
            (count,) = struct.unpack(">I", self._read(_NUMBER_BYTES))
            lengths = struct.unpack(f">{count}I", self._read(count * _NUMBER_BYTES))
            return [self._read(length) for length in lengths]
        except (
            EOFError,
            OSError,
        ):  # a process that is killed with unread messages resets the connection
            return None

    def _read(self, count: int) -> bytearray:
        content = bytearray(count)
        if self._incoming.readinto(content) < count:
            raise EOFError
        return content

    def end(self) -> None:
        """Shut the socket down for both ends; idempotent, from any thread."""
        try:
            self._end.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close the socket; no thread may be using it."""
        self._incoming.close()
        self._end.close()
