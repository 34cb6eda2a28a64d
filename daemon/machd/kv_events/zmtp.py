"""ZMTP 3.1 as far as a PUB and a ROUTER socket need it, with a bound on all that a peer can send.

In place of libzmq, which bounds neither the connections that it accepts, nor the parts of a message, nor what a
subscriber subscribes to (docs/decisions/ranks.md, 0066). The mechanism is NULL: ZeroMQ's RFCs 23 and 37.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection

MAX_FRAME_BYTES = 1024
"""Of a frame that a peer sends: a handshake's properties, a subscription's prefix, a sequence number."""

MAX_PARTS = 3
"""Frames of a message that a peer sends; a request for replay has two."""

HANDSHAKE_S = 10.0

_PAUSE_S = 0.02
"""Between two messages of a peer, so that one that sends without end takes little of the processor."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_SHORT_BYTES = 255

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING_BYTES = 64
_MAJOR_VERSION_AT, _MECHANISM = 10, slice(12, 32)
_NULL_MECHANISM = b"NULL".ljust(20, b"\0")
_GREETING = (_SIGNATURE + b"\x03\x01" + _NULL_MECHANISM).ljust(_GREETING_BYTES, b"\0")

_SUBSCRIPTIONS = {b"SUBSCRIBE": b"\x01", b"CANCEL": b"\x00"}
"""Commands of ZMTP 3.1, and the first byte of the message that ZMTP 3.0 has in their place."""

_TTL_BYTES, _MAX_PING_CONTEXT_BYTES = 2, 16


class PeerError(Exception):
    """The peer has left, or sends what this end does not take; its connection ends."""


class ZmtpConnection:
    """A connection that was accepted; used from one event loop."""

    def __init__(self, connection: socket.socket) -> None:
        """Talk over a non-blocking socket; the caller closes it."""
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    async def shake_hands(self, socket_type: bytes, peer_types: Collection[bytes]) -> None:
        """Exchange greetings and the types of the sockets.

        Raises:
            PeerError: It speaks something else, or its socket is of none of ``peer_types``.
            TimeoutError: It took longer than ``HANDSHAKE_S``.
        """
        async with asyncio.timeout(HANDSHAKE_S):
            await self.send(_GREETING)
            greeting = await self._receive_bytes(_GREETING_BYTES)
            if (
                greeting[0] != _SIGNATURE[0]
                or greeting[_MAJOR_VERSION_AT] < _GREETING[_MAJOR_VERSION_AT]
                or greeting[_MECHANISM] != _NULL_MECHANISM
            ):
                raise PeerError("it does not speak ZMTP 3 without security")
            await self.send(_command(b"READY", _property(b"Socket-Type", socket_type)))
            flags, body = await self._receive_frame()
            name, properties = _command_parts(body)
            if not flags & _COMMAND or name != b"READY":
                raise PeerError("it is not ready")
            if _properties(properties).get(b"socket-type") not in peer_types:
                raise PeerError("its socket is of another type")

    async def receive(self) -> list[bytes]:
        r"""Return the parts of the next message; a subscription is one part, ``\x01`` or ``\x00`` before its prefix.

        Raises:
            PeerError: The peer has left, or what it sends has no end.
        """
        while True:
            await asyncio.sleep(_PAUSE_S)
            flags, body = await self._receive_frame()
            if not flags & _COMMAND:
                return await self._receive_rest(flags, body)
            name, rest = _command_parts(body)
            if name == b"PING":
                context = rest[_TTL_BYTES:][:_MAX_PING_CONTEXT_BYTES]
                await self.send(_command(b"PONG", context))
            elif name in _SUBSCRIPTIONS:
                return [_SUBSCRIPTIONS[name] + rest]

    async def send(self, data: bytes) -> None:
        """Send, once everything before it is sent; waits for as long as the peer does not read."""
        async with self._sending:
            await self._loop.sock_sendall(self._socket, data)

    async def _receive_rest(self, flags: int, body: bytes) -> list[bytes]:
        parts = [body]
        while flags & _MORE:
            if len(parts) == MAX_PARTS:
                raise PeerError("a message has too many parts")
            flags, body = await self._receive_frame()
            parts.append(body)
        return parts

    async def _receive_frame(self) -> tuple[int, bytes]:
        """Return flags and body of a frame."""
        flags, size = await self._receive_bytes(2)
        if flags & _LONG:
            size = int.from_bytes(bytes((size,)) + await self._receive_bytes(7), "big")
        if size > MAX_FRAME_BYTES:
            raise PeerError("a frame is too long")
        return flags, await self._receive_bytes(size)

    async def _receive_bytes(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            piece = await self._loop.sock_recv(self._socket, count - len(received))
            if not piece:
                raise PeerError("it has left")
            received += piece
        return bytes(received)


def encoded_message(*parts: bytes) -> bytes:
    """Return a message of several parts as it is sent."""
    last = len(parts) - 1
    return b"".join(_frame(part, _MORE if at < last else 0) for at, part in enumerate(parts))


def _frame(body: bytes, flags: int) -> bytes:
    if len(body) <= _SHORT_BYTES:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + len(body).to_bytes(8, "big") + body


def _command(name: bytes, data: bytes) -> bytes:
    return _frame(bytes((len(name),)) + name + data, _COMMAND)


def _command_parts(body: bytes) -> tuple[bytes, bytes]:
    """Return a command's name, which is empty where there is none, and its data."""
    end = 1 + body[0] if body else 0
    return body[1:end], body[end:]


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return a handshake's properties, with their names in lower case; one that is cut short is as long as it is."""
    found: dict[bytes, bytes] = {}
    while data:
        name, data = data[1 : 1 + data[0]], data[1 + data[0] :]
        size, data = int.from_bytes(data[:4], "big"), data[4:]
        found[name.lower()], data = data[:size], data[size:]
    return found
