"""One client's socket: calls and channels side by side, each of them a task with requests of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from litestar import WebSocket
from litestar.exceptions import WebSocketDisconnect

from machd.dialects.lm_studio_socket import messages
from machd.dialects.lm_studio_socket.errors import told
from machd.errors import MachdError, NotFoundError, TooManyInFlightError
from machd.http.failures import unexpected
from machd.http.inner_request import AnsweredError, InnerClient
from machd.http.socket_connection import SocketConnection

_MAX_OPEN = 128
"""Calls and channels of one socket that are answered side by side."""

_IDLE_S = 12 * 3600.0
"""How long a socket with nothing open stays; a notebook's client opens no other by itself."""

_IDLE_CODE = 1001


class Channel:
    """An answer of many messages.

    Attributes:
        client: Makes its requests; has left once the client has cancelled it.
    """

    def __init__(
        self, client: InnerClient, send: Callable[[Mapping[str, object]], Awaitable[None]]
    ) -> None:
        self.client = client
        self._send = send

    async def send(self, packet: Mapping[str, object]) -> None:
        """Send a message, in the channel's form; it waits while the client does not read."""
        await self._send({"type": "channelSend", "message": packet})


Call: TypeAlias = Callable[[InnerClient, bytes], Awaitable[object]]
"""Makes a call's result of its parameter, which is JSON."""

Answer: TypeAlias = Callable[[Channel, bytes], Awaitable[None]]
"""Answers in a channel; gets its parameter, which is JSON."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What one socket's path serves.

    Attributes:
        missing: Says that anything else is not served.
        max_waiting: Calls of a socket that may wait, beside those that are answered; beyond it they get an error.
    """

    calls: Mapping[str, Call]
    channels: Mapping[str, Answer]
    missing: str
    max_waiting: int = 0


class Session:
    """Reads a socket's messages until its client leaves, and then ends what is open."""

    def __init__(
        self,
        socket: WebSocket[Any, Any, Any],
        connection: SocketConnection,
        namespace: Namespace,
        authorization: str | None,
    ) -> None:
        """Serve ``namespace`` to a client whose requests have ``authorization`` as the header of that name."""
        self._socket = socket
        self._connection = connection
        self._namespace = namespace
        self._authorization = authorization
        self._max_open = _MAX_OPEN + namespace.max_waiting
        self._places = asyncio.Semaphore(_MAX_OPEN)
        self._open: set[asyncio.Task[None]] = set()
        self._channels: dict[int, Channel] = {}

    async def run(self) -> None:
        """Read until the client leaves, or has had nothing open for ``_IDLE_S``."""
        try:
            while True:
                try:
                    async with asyncio.timeout(_IDLE_S):
                        text = await self._socket.receive_text()
                except TimeoutError:
                    if not self._open:
                        await self._socket.close(_IDLE_CODE, f"nothing was asked for {_IDLE_S:g} s")
                        return
                else:
                    await self._take(text)
        except WebSocketDisconnect:
            return
        finally:
            open_tasks = tuple(self._open)
            for task in open_tasks:
                task.cancel()
            # Their requests give back what they hold.
            await asyncio.gather(*open_tasks, return_exceptions=True)

    async def _take(self, text: str) -> None:
        try:
            message: messages.ClientMessage = msgspec.json.decode(text, type=messages.ClientMessage)
        except (msgspec.DecodeError, RecursionError) as error:
            await self._warn(f"a message was not understood, and does nothing: {error}")
            return
        match message:
            case messages.KeepAlive():
                await self._send({"type": "keepAliveAck"})
            case messages.RpcCall():
                number: dict[str, object] = {"callId": message.call_id}
                await self._begin(lambda: self._call(message), number, "rpcError")
            case messages.ChannelCreate():
                await self._open_channel(message)
            case messages.ChannelSend():
                await self._take_packet(message)
            case messages.SignalSubscribe() | messages.WritableSignalSubscribe():
                is_readable = isinstance(message, messages.SignalSubscribe)
                failed = "signalError" if is_readable else "writableSignalError"
                refusal = NotFoundError("this server has no signals")
                number = {"subscribeId": message.subscribe_id}
                await self._send({"type": failed, **number, "error": told(refusal)})
            case messages.CommunicationWarning() | messages.ChannelAck():
                pass

    async def _open_channel(self, message: messages.ChannelCreate) -> None:
        number = {"channelId": message.channel_id}
        if message.channel_id in self._channels:
            await self._warn(f"channel {message.channel_id} is open already")
            return
        channel = Channel(self._client(), lambda packet: self._send({**packet, **number}))
        if await self._begin(lambda: self._answer(channel, message), number, "channelError"):
            self._channels[message.channel_id] = channel

    async def _take_packet(self, message: messages.ChannelSend) -> None:
        number = {"channelId": message.channel_id}
        if message.ack_id is not None:
            await self._send({"type": "channelAck", **number, "ackId": message.ack_id})
        channel = self._channels.get(message.channel_id)
        # A channel that has just ended may be cancelled still, which is no mistake.
        if channel is not None and message.message.type == "cancel":
            channel.client.leave()

    async def _begin(
        self,
        answering: Callable[[], Coroutine[Any, Any, None]],
        number: Mapping[str, object],
        failed: str,
    ) -> bool:
        """Answer in a task, if there is room, and return whether there is.

        ``failed`` is the type of the message that tells an error.
        """
        if len(self._open) >= self._max_open:
            refusal = TooManyInFlightError(
                f"one connection has {self._max_open} calls and channels open at most"
            )
            await self._send({"type": failed, **number, "error": told(refusal)})
            return False

        async def answer() -> None:
            try:
                async with self._places:
                    await answering()
            except Exception as error:  # noqa: BLE001 - one answer's mistake ends no other
                known = (
                    error if isinstance(error, MachdError | AnsweredError) else unexpected(error)
                )
                await self._send({"type": failed, **number, "error": told(known)})

        task = asyncio.create_task(answer())
        self._open.add(task)
        self._connection.note_busy(is_busy=True)
        task.add_done_callback(self._end)
        return True

    def _end(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not self._open:
            self._connection.note_busy(is_busy=False)

    async def _call(self, message: messages.RpcCall) -> None:
        call = self._namespace.calls.get(message.endpoint)
        if call is None:
            raise NotFoundError(self._namespace.missing)
        result = await call(self._client(), bytes(message.parameter))
        answer = {"type": "rpcResult", "callId": message.call_id}
        await self._send(answer if result is None else {**answer, "result": result})

    async def _answer(self, channel: Channel, message: messages.ChannelCreate) -> None:
        answer = self._namespace.channels.get(message.endpoint)
        try:
            if answer is None:
                raise NotFoundError(self._namespace.missing)
            await answer(channel, bytes(message.creation_parameter))
        finally:
            del self._channels[message.channel_id]
        await self._send({"type": "channelClose", "channelId": message.channel_id})

    def _client(self) -> InnerClient:
        return InnerClient(self._connection.server_app, self._socket.scope, self._authorization)

    async def _warn(self, warning: str) -> None:
        await self._send({"type": "communicationWarning", "warning": warning})

    async def _send(self, message: Mapping[str, object]) -> None:
        """Send a message, unless the client has gone: :meth:`run` sees that, and ends what is open."""
        with suppress(OSError, WebSocketDisconnect):
            await self._socket.send_text(msgspec.json.encode(message).decode())
