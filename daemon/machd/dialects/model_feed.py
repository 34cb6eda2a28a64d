"""``GET /models/sse``: what each model does, and each change of it, as the router of llama.cpp tells it.

Shapes are of "Using multiple models" in llama.cpp's ``tools/server/README.md``. Its page (``tools/ui``) has a model loaded or
unloaded and then waits for the event that says so, so that without this feed it waits for ever. Two things go beyond the
router's: the states of now come first, because the page opens the feed and asks for a load at the same time; and the feed
ends once there are other models, because the page opens it again, and is then told of those.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import msgspec
from litestar.di import NamedDependency
from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec import UNSET, Struct, UnsetType

from machd.dialects.endpoint import endpoint
from machd.dialects.listed_models import models_by_name
from machd.dialects.models import ModelStatus, model_status
from machd.errors import ClientDisconnectedError, NotFoundError
from machd.http.context import ServerContext
from machd.http.endpoint import EVENTS, Answer
from machd.http.sse import COMMENT_KEEP_ALIVE, EVENT_STREAM, data_frame
from machd.http.stream import while_connected

_HEADERS = [
    (b"content-type", EVENT_STREAM),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ChangedStatus(Struct, frozen=True, kw_only=True):
    """What a model does now.

    Attributes:
        status: As in ``GET /models``.
        exit_code: 1 where it could not be loaded, or its engine has failed for good; left out before the first change.
    """

    status: Literal["loaded", "loading", "unloaded", "downloading"]
    exit_code: Literal[0, 1] | UnsetType = UNSET


class ModelChange(Struct, frozen=True, kw_only=True):
    """One event of the feed.

    Attributes:
        model: Its name, or one of its aliases: a change is told for each. ``*`` for ``models_reload``.
        event: ``models_reload`` where other models are served now: read ``GET /models``, and open the feed again.
    """

    model: str
    event: Literal["status_change", "models_reload"]
    data: ChangedStatus | UnsetType = UNSET


@endpoint("GET /models/sse", Answer(200, ModelChange, EVENTS), also=(404,))
async def watch_models(context: NamedDependency[ServerContext]) -> ASGIApp:
    """What each of several models does, and each change of it."""
    if context.models.is_one:
        raise NotFoundError("nothing is served at this path")
    return _ModelFeed(context)


class _ModelFeed:
    """An ASGI application: events until the client leaves, the daemon stops, or there are other models."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._told: dict[str, ModelStatus] = {}

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        with suppress(ClientDisconnectedError):
            await while_connected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        models = self._context.models
        at_first = set(models)
        keepalive_s = self._context.settings.streaming.keepalive_s
        with models.watched() as changed:
            while not models.is_stopped and set(models) == at_first:
                changed.clear()
                frames = b"".join(map(_frame, self._changes()))
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                try:
                    async with asyncio.timeout(keepalive_s):
                        await changed.wait()
                except TimeoutError:
                    await send(
                        {
                            "type": "http.response.body",
                            "body": COMMENT_KEEP_ALIVE,
                            "more_body": True,
                        }
                    )
        last = b"" if models.is_stopped else _frame(ModelChange(model="*", event="models_reload"))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _changes(self) -> Iterator[ModelChange]:
        """Give what is to be told, and count it as told."""
        for name, model in models_by_name(self._context).items():
            status, before = model_status(model), self._told.get(name)
            if status == before:
                continue
            self._told[name] = status
            is_first = before is None
            exit_code = UNSET if is_first or status.value != "unloaded" else status.exit_code or 0
            yield ModelChange(
                model=name,
                event="status_change",
                data=ChangedStatus(status=status.value, exit_code=exit_code),
            )


def _frame(change: ModelChange) -> bytes:
    return data_frame(msgspec.json.encode(change))
