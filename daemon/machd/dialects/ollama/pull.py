"""Ollama's ``/api/pull``: a model from the hub, with the statuses that Ollama's clients show."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp
from msgspec import UNSET, Struct, UnsetType

from machd.dialects.bodies import read_public_body
from machd.dialects.endpoint import endpoint
from machd.dialects.ollama.answer import OllamaErrorBody, ollama_not_found
from machd.dialects.wire import bounds
from machd.dialects.wire.refusal import Ignored
from machd.engine.protocol.downloads import (
    Downloaded,
    DownloadEvent,
    DownloadFailed,
    DownloadOrder,
    DownloadPlanned,
    DownloadProgress,
)
from machd.errors import InvalidRequestError
from machd.http.authentication import require_operator
from machd.http.context import ServerContext
from machd.http.download_stream import DownloadStream
from machd.http.endpoint import JSON_LINES, Answer
from machd.http.stream import while_connected
from machd.served.downloads import DownloadWatch, check_online
from machd.settings.texts import HUB_ID

_HUB_HOSTS = ("hf.co/", "huggingface.co/")
_LATEST = "latest"


class OllamaPullRequest(Struct, frozen=True, kw_only=True):
    """A model of the hub: ``ORG/NAME``, with ``hf.co/`` before it or without, and a GGUF file's tag behind a colon.

    Attributes:
        name: What ``model`` was called before.
        stream: Progress as lines of JSON; without it the answer comes at the end.
    """

    model: bounds.ModelName | None = None
    name: bounds.ModelName | None = None
    stream: bool = True
    insecure: Ignored = UNSET
    username: Ignored = UNSET
    password: Ignored = UNSET

    def order(self) -> DownloadOrder:
        """Return what is to be fetched.

        Raises:
            InvalidRequestError: It is no name of a model on the hub.
        """
        name = self.model or self.name or ""
        for host in _HUB_HOSTS:
            name = name.removeprefix(host)
        model, _, tag = name.partition(":")
        if not HUB_ID.fullmatch(model) or not all(one.isalnum() or one in "._-" for one in tag):
            raise InvalidRequestError.at(
                "model", "this server fetches models of the Hugging Face hub: ORG/NAME"
            )
        include = () if tag in {"", _LATEST} else (f"*{tag}*.gguf",)
        return DownloadOrder(model=model, include=include)


class OllamaPullStatus(Struct, frozen=True, kw_only=True):
    """How far a download is.

    Attributes:
        digest: Of the file that is fetched.
        total: Bytes of that file.
        completed: Bytes of it that are here.
        note: Why what has come is not served yet, in an answer that is no stream.
    """

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET
    note: str | UnsetType = UNSET


@endpoint(
    "POST /api/pull",
    OllamaPullStatus,
    Answer(200, OllamaPullStatus, JSON_LINES),
    takes=OllamaPullRequest,
    also=(409,),
    errors=(OllamaErrorBody,),
)
async def pull_ollama_model(
    request: Request[Any, Any, Any], context: NamedDependency[ServerContext]
) -> ASGIApp:
    """Fetch a model from the hub, in Ollama's words."""
    body = await read_public_body(request, context, OllamaPullRequest)
    if not context.has_operators:
        raise ollama_not_found("/api/pull")  # nothing that comes would be served
    require_operator(request.scope)
    order = body.order()
    check_online(context.settings)
    watch = await context.downloads.follow(order)
    keepalive_s = context.settings.streaming.keepalive_s
    if body.stream:
        return DownloadStream(watch, _lines, keepalive_s=keepalive_s)
    try:
        ending = await while_connected(request.receive, _ending(watch, keepalive_s))
    finally:
        watch.close()
    status_code = 500 if isinstance(ending, DownloadFailed) else 200
    last = _statuses(ending)[-1]
    if isinstance(ending, Downloaded) and ending.note:
        last = OllamaPullStatus(status="success", note=ending.note)
    content = msgspec.json.encode(last)
    return ASGIResponse(body=content, status_code=status_code, media_type="application/json")


async def _ending(watch: DownloadWatch, keepalive_s: float) -> DownloadEvent:
    ending: DownloadEvent | None = None
    async for event in watch.events(keepalive_s):
        ending = event
    assert ending is not None, "every download tells its end"
    return ending


def _lines(event: DownloadEvent) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in _statuses(event))


def _statuses(event: DownloadEvent) -> list[OllamaPullStatus | OllamaErrorBody]:
    match event:
        case DownloadPlanned():
            return [OllamaPullStatus(status="pulling manifest")]
        case DownloadProgress():
            return [
                OllamaPullStatus(
                    status=f"pulling {event.digest[:12]}",
                    digest=f"sha256:{event.digest}",
                    total=event.total_bytes,
                    completed=event.completed_bytes,
                )
            ]
        case Downloaded():
            notes = (event.note,) if event.note else ()
            words = ("verifying sha256 digest", "writing manifest", *notes, "success")
            return [OllamaPullStatus(status=word) for word in words]
        case DownloadFailed():
            return [OllamaErrorBody(error=event.message)]
        case _:
            return [OllamaPullStatus(status="waiting for another download of this model")]
