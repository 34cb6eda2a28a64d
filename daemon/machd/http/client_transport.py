"""A connection's transport: counts what is written, and closes without taking back an answer.

A socket that is closed with unread bytes in it sends a reset, and the client's system throws away what it
has received and not read yet. So where the client is still sending, closing is half a close: the end of the
answer goes out, and what still comes is read and dropped until the client closes its side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class ClientTransport:
    """A transport whose ``close`` waits for a client that is still sending.

    Attributes:
        written_bytes: What was written so far.
        is_lingering: Whether the answer has ended and what the client still sends is dropped.
    """

    def __init__(self, transport: asyncio.Transport, is_client_sending: Callable[[], bool]) -> None:
        """Wrap a transport; ``is_client_sending`` is asked once, when it is to be closed."""
        self._transport = transport
        self._is_client_sending = is_client_sending
        self.written_bytes = 0
        self.is_lingering = False

    def write(self, data: bytes) -> None:
        """Write, unless the answer has ended."""
        if self.is_lingering:
            return
        self.written_bytes += len(data)
        self._transport.write(data)

    def close(self) -> None:
        """End the answer; the connection as well, unless the client is still sending."""
        if self.is_closing():
            return
        if not self._is_client_sending():
            self._transport.close()
            return
        try:
            self._transport.write_eof()  # behind what waits to be written
        except OSError:  # the client has reset the connection
            self._transport.close()
            return
        self.is_lingering = True
        self._transport.resume_reading()

    def close_now(self) -> None:
        """End the connection once everything is written, whatever the client still sends."""
        self._transport.close()

    def is_closing(self) -> bool:
        """True if nothing more can be written."""
        return self.is_lingering or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a transport has
        return getattr(self._transport, name)
