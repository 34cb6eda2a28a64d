"""Endpoints of the public API: the answers that follow from what one takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from litestar.handlers import HTTPRouteHandler

from machd.dialects.openai_stream import OpenAIStream
from machd.dialects.wire.errors import ErrorBody
from machd.http.cold_stream import ColdRequest, begins_cold
from machd.http.endpoint import EVENTS, Answer, Body, served
from machd.http.stream import StreamShape

# 401, 403, 421 and 503: the key, the Origin, the Host and the room are looked at first of all.
_OPEN = (403, 421)
_READING = (401, 403, 421, 503)
_POSTING = (400, 401, 403, 404, 408, 413, 415, 421, 500, 503)
_GENERATING = (*_POSTING, 429, 504)


def endpoint(  # noqa: PLR0913 - a property of the endpoint each
    route: str,
    *gives: Body,
    takes: Body = None,
    streams: Body = None,
    stream_type: str = EVENTS,
    also: Iterable[int] = (),
    errors: tuple[Body, ...] = (ErrorBody,),
    public: bool = False,
    id_as: str = "",
    cold: Callable[[ColdRequest], StreamShape] = lambda _: OpenAIStream(),
) -> Callable[[Callable[..., Any]], HTTPRouteHandler]:
    """Describe and serve an endpoint; see :func:`machd.http.endpoint.served`.

    ``gives`` are bodies of a success, or whole answers, and ``errors`` those of an error in each dialect. ``streams`` is
    what each event or line of a stream holds. ``also`` are statuses of errors beside those of every endpoint of its kind. ``cold`` makes the shape of a
    stream whose model is not ready.
    """
    answers = [one if isinstance(one, Answer) else Answer(200, one) for one in gives]
    statuses: tuple[int, ...] = _OPEN if public else _READING if takes is None else _POSTING
    if streams is not None:
        answers.append(Answer(200, streams, stream_type))
        statuses = _GENERATING
    answers += [Answer(status, body) for body in errors for status in (*statuses, *also)]

    def make(function: Callable[..., Any]) -> HTTPRouteHandler:
        handler = function if streams is None else begins_cold(function, cold)
        return served(route, tuple(answers), takes=takes, public=public, id_as=id_as)(handler)

    return make
