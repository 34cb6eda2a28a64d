"""Endpoints of the admin API: the answers that follow from what one takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from litestar.handlers import HTTPRouteHandler

from machd.admin.errors import AdminErrorBody
from machd.http.endpoint import Answer, Body, served

_EVERY = (401, 403, 421, 500, 503)
_READING_A_BODY = (400, 408, 413, 415)


def endpoint(
    route: str,
    gives: Body,
    *,
    takes: Body = None,
    also: Iterable[int] = (),
    id_as: str = "",
    **options: Any,  # noqa: ANN401 - the framework's
) -> Callable[[Callable[..., Any]], HTTPRouteHandler]:
    """Describe and serve an endpoint; see :func:`machd.http.endpoint.served`.

    ``also`` are statuses of errors beside those of every endpoint.
    """
    answer = gives if isinstance(gives, Answer) else Answer(200, gives)
    statuses = sorted({*_EVERY, *also, *(() if takes is None else _READING_A_BODY)})
    answers = (answer, *(Answer(status, AdminErrorBody) for status in statuses))
    return served(route, answers, takes=takes, id_as=id_as, **options)
