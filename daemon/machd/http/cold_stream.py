"""A stream whose model is not ready: it begins at once, and the answer follows in it.

The endpoint's handler goes on in a task of its own. Once it waits for a model (:func:`note_cold`), the framework
gets this application, which sends headers and keep-alive frames until the handler's answer starts. An error that comes
before that ends the stream in the dialect's shape, because its status is spent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

from litestar import Request
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from machd.http.context import ServerContext
from machd.http.failures import noted
from machd.http.large_bodies import lease_of
from machd.http.stream import StreamShape, keep_alive, state_header, stream_headers
from machd.panics import ENDINGS
from machd.served.named_model import NamedModel

_NOTED_KEY = "machd_cold_stream"

Handler: TypeAlias = Callable[..., Coroutine[Any, Any, ASGIApp]]


@dataclass(frozen=True, slots=True)
class ColdRequest:
    """A request for a stream, and the model that it waits for.

    Attributes:
        name: The ``model`` that its answer will have.
        body: The request's body, decoded and right by itself.
    """

    request: Request[Any, Any, Any]
    context: ServerContext
    model: NamedModel
    name: str
    body: object


def begins_cold(handler: Handler, shape_of: Callable[[ColdRequest], StreamShape]) -> Handler:
    """Wrap a handler so that a stream begins while its model is not ready, where there are several models."""

    @wraps(handler)
    async def answer(request: Request[Any, Any, Any], context: ServerContext) -> ASGIApp:
        if context.models.is_one:
            return await handler(request=request, context=context)
        cold: asyncio.Future[ColdRequest] = asyncio.get_running_loop().create_future()
        request.scope["state"][_NOTED_KEY] = cold
        answering = asyncio.create_task(handler(request=request, context=context))
        try:
            tasks: set[asyncio.Future[Any]] = {answering, cold}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            return _ColdStream(answering, cold.result(), shape_of(cold.result()))
        except BaseException:
            await _end(answering)
            raise

    return answer


def note_cold(cold: ColdRequest) -> None:
    """Note that a request waits for its model, so that its stream begins."""
    waiting = cold.request.scope["state"].get(_NOTED_KEY)
    if waiting is not None and not waiting.done():
        waiting.set_result(cold)


class _ColdStream:
    """An ASGI application: headers, keep-alive frames, and the answer that a handler is still making."""

    def __init__(
        self, answering: asyncio.Task[ASGIApp], cold: ColdRequest, shape: StreamShape
    ) -> None:
        self._answering = answering
        self._cold = cold
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; the handler ends with this, whatever happens."""
        try:
            await self._answer(scope, receive, send)
        finally:
            await _end(self._answering)  # so that its lease is one of the request's, or has ended

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body_lease = lease_of(scope)
        body_lease.outlasts_start = True  # the handler still needs the body
        headers = [*stream_headers(self._shape), state_header(self._cold.model.state)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        keeping_alive = asyncio.create_task(self._keep_alive(send))
        has_started = False

        async def send_answer(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                body_lease.release()
                await _end(keeping_alive)
            else:
                await send(message)

        try:
            response = await self._answering
            await response(scope, receive, send_answer)
        except ENDINGS:
            raise
        except BaseException as error:
            if has_started:
                raise
            ending = self._shape.failure(noted(self._cold.request, error))
            await _end(keeping_alive)
            await send({"type": "http.response.body", "body": ending, "more_body": False})
        finally:
            await _end(keeping_alive)

    async def _keep_alive(self, send: Send) -> None:
        pause_s = self._cold.context.settings.streaming.keepalive_s
        while True:
            await send({"type": "http.response.body", "body": self._frame(), "more_body": True})
            await asyncio.sleep(pause_s)

    def _frame(self) -> bytes:
        """The dialect's keep-alive, which says what the model does, and how much of it is loaded, where it can."""
        model, said = self._cold.model, ""
        if not model.is_ready:
            stage = model.load_stage
            share = f", {100 * stage.share:.0f} %" if stage is not None and stage.share else ""
            said = f"{model.state} {model.name}{share}"
        return keep_alive(self._shape, said)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # it is looked at, or the event loop would report it
