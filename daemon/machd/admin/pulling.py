"""Downloads of models from the hub, for operators: begun, followed and stopped."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Request
from litestar.di import NamedDependency
from litestar.types import ASGIApp
from msgspec import Meta, Struct

from machd.admin.config import body_timeout_s
from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.dialects.bodies import read_body
from machd.engine.protocol.downloads import (
    MAIN_REVISION,
    DownloadEvent,
    DownloadOrder,
)
from machd.errors import ConflictError
from machd.http.download_stream import DownloadStream
from machd.http.endpoint import JSON_LINES, Answer
from machd.served.downloads import check_online
from machd.settings.texts import HUB_ID, HUB_REVISION

_Pattern = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f]+$")]


class PullRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the hub.

    Attributes:
        model: ``ORG/NAME``.
        revision: A branch, a tag or a commit.
        include: Patterns of files; without any, what mlx-lm reads.
    """

    model: Annotated[str, Meta(max_length=200, pattern=rf"^(?:{HUB_ID.pattern})$")]
    revision: Annotated[str, Meta(max_length=200, pattern=rf"^(?:{HUB_REVISION.pattern})$")] = (
        MAIN_REVISION
    )
    include: Annotated[list[_Pattern], Meta(max_length=64)] = []


class StoppedDownload(Struct, frozen=True, kw_only=True):
    """The model whose download was stopped."""

    model: str


@endpoint(
    "POST /admin/models/pull",
    Answer(200, DownloadEvent, JSON_LINES),
    takes=PullRequest,
    also=(409,),
)
async def pull_model(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> ASGIApp:
    """Fetch a model from the hub, and tell how far that is, a JSON object a line.

    Leaving stops the download, unless another client follows it; what has come is kept.
    """
    body = await read_body(request, PullRequest, timeout_s=body_timeout_s(admin))
    settings = admin.configuration.settings
    check_online(settings)
    order = DownloadOrder(model=body.model, revision=body.revision, include=tuple(body.include))
    return DownloadStream(
        await admin.downloads.follow(order),
        lambda event: msgspec.json.encode(event) + b"\n",
        keepalive_s=settings.streaming.keepalive_s,
    )


@endpoint("DELETE /admin/models/pull", StoppedDownload, also=(409,))
async def stop_pull(admin: NamedDependency[AdminContext]) -> StoppedDownload:
    """Stop the download of now; what has come is kept, and the next one goes on from there."""
    model = admin.downloads.cancel()
    if model is None:
        raise ConflictError("nothing is being fetched")
    return StoppedDownload(model=model)
