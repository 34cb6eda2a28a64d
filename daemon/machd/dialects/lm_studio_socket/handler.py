"""The web sockets of LM Studio's packages: one for each namespace, whose first message names the client."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Iterator
from typing import Any, cast

import msgspec
from litestar import WebSocket, websocket
from litestar.exceptions import WebSocketDisconnect

from machd.dialects.lm_studio_socket.endpoints import NAMESPACES
from machd.dialects.lm_studio_socket.messages import Authentication
from machd.dialects.lm_studio_socket.session import Session
from machd.errors import AuthenticationError
from machd.http.answering import connection_of
from machd.http.authentication import authorization_for
from machd.http.endpoint import PUBLIC
from machd.http.socket_connection import SocketConnection

_FIRST_MESSAGE_S = 10.0


@websocket([f"/{one}" for one in NAMESPACES], opt={PUBLIC: True})
async def serve_lm_studio(socket: WebSocket[Any, Any, Any]) -> None:
    """Take a client's first message, and then whatever it asks for."""
    await socket.accept()
    try:
        authorization = await _authenticate(socket)
        await socket.send_text('{"success":true}')
        session = Session(
            socket,
            cast(SocketConnection, connection_of(socket.scope)),
            NAMESPACES[socket.scope["path"].removeprefix("/")],
            authorization,
        )
        await session.run()
    except WebSocketDisconnect:
        return
    except AuthenticationError as error:
        problem = {"success": False, "error": str(error)}
        await socket.send_text(msgspec.json.encode(problem).decode())
        await socket.close(code=1008)


async def _authenticate(socket: WebSocket[Any, Any, Any]) -> str | None:
    """Return the ``Authorization`` header that the client's key makes; None where no key is needed.

    Raises:
        AuthenticationError: It has none that is good, or does not say so in time.
    """
    try:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            first = await socket.receive_text()
        message = msgspec.json.decode(first, type=Authentication)
    except TimeoutError:
        raise AuthenticationError(
            f"the first message did not come within {_FIRST_MESSAGE_S:g} s"
        ) from None
    except (msgspec.DecodeError, KeyError, RecursionError):
        raise AuthenticationError(
            "the first message has authVersion 1, clientIdentifier and clientPasskey"
        ) from None
    try:
        return authorization_for(socket, _keys(socket, message))
    except AuthenticationError:
        raise AuthenticationError(
            "send an API key of this server: as clientPasskey, as apiToken where it has the form "
            "sk-lm-ID:SECRET, or in the host, such as user:KEY@127.0.0.1:8080"
        ) from None


def _keys(socket: WebSocket[Any, Any, Any], message: Authentication) -> Iterator[str]:
    """What may be a key, of the headers and of the first message."""
    for header in socket.headers.getall("authorization", []):
        scheme, _, given = header.partition(" ")
        if scheme.lower() == "bearer":
            yield given
        elif scheme.lower() == "basic":
            try:
                # A URL's user and password: the package for Python has no other place for a key.
                yield base64.b64decode(given, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                continue
    yield from socket.headers.getall("x-api-key", [])
    if message.client_passkey.isascii() and message.client_identifier.isascii():
        yield message.client_passkey
        yield f"sk-lm-{message.client_identifier}:{message.client_passkey}"
