"""Open requests for an operator: their clients and progress, never their texts."""

from __future__ import annotations

import structlog
from litestar.di import NamedDependency
from litestar.params import FromPath
from msgspec import Struct

from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.admin.finished_requests import FinishedRequestList
from machd.admin.open_requests import OpenRequest, open_requests
from machd.errors import NotFoundError, OperatorAbortError


class OpenRequestList(Struct, frozen=True, kw_only=True):
    """The open requests, the oldest first."""

    requests: list[OpenRequest]


class AbortedRequests(Struct, frozen=True, kw_only=True):
    """The generations that an operator has ended.

    Asking twice does no harm: one that is on its way out is ended again, and one that has left is
    unknown.
    """

    aborted: list[str]


@endpoint("GET /admin/requests", OpenRequestList)
async def list_requests(admin: NamedDependency[AdminContext]) -> OpenRequestList:
    """The open requests: their clients and progress, never their texts.

    The oldest first.
    """
    return OpenRequestList(requests=open_requests(admin))


@endpoint("GET /admin/requests/finished", FinishedRequestList)
async def list_finished_requests(admin: NamedDependency[AdminContext]) -> FinishedRequestList:
    """The last 200 finished requests: their clients, times and counts, never their texts.

    The newest first.
    """
    return FinishedRequestList(requests=admin.finished.newest_first)


@endpoint("DELETE /admin/requests/{id}", AbortedRequests, also=(404,), id_as="request_id:str")
async def abort_requests(
    request_id: FromPath[str], admin: NamedDependency[AdminContext]
) -> AbortedRequests:
    """End the open requests of an X-Request-Id, or the one of an id in the list.

    Ending the same one again does no harm while its client has not been told yet; once it has,
    the id is unknown.
    """
    waiting = [
        one
        for one in admin.models.waiting_requests
        if request_id in {one.waiting_id, one.asker.request_id}
    ]
    opened = [
        one
        for one in admin.open_generations.requests
        if request_id in {one.identity.generation_id, one.identity.request_id}
        and not one.is_finished
    ]
    if not waiting and not opened:
        raise NotFoundError("no open request has this id")
    for one in (*waiting, *opened):
        one.fail(OperatorAbortError("an operator has ended this request"))
    aborted = [one.waiting_id for one in waiting]
    aborted += [one.identity.generation_id for one in opened]
    structlog.get_logger("machd.admin").warning("requests.aborted", ids=aborted)
    return AbortedRequests(aborted=aborted)
