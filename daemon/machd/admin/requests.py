"""``GET /admin/requests`` and ``DELETE /admin/requests/{id}``."""

from __future__ import annotations

import structlog
from litestar import delete, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from machd.admin.context import AdminContext
from machd.admin.requests_wire import AbortedRequests, OpenRequest, OpenRequestList
from machd.errors import NotFoundError, OperatorAbortError
from machd.serving.generation import Generation


@get("/admin/requests")
async def list_requests(admin: NamedDependency[AdminContext]) -> OpenRequestList:
    """Every open generation, the oldest first."""
    now_s = admin.clock.monotonic_s()
    return OpenRequestList(
        requests=[_open_request(one, now_s) for one in admin.service.open_generations]
    )


@delete("/admin/requests/{request_id:str}", status_code=200)
async def abort_requests(
    request_id: FromPath[str], admin: NamedDependency[AdminContext]
) -> AbortedRequests:
    """End what goes by an id: the answer's own, or the request's, which several may share.

    Ending the same one again does no harm while its client has not been told yet; once it has,
    the id is unknown.
    """
    found = [
        one
        for one in admin.service.open_generations
        if request_id in {one.identity.generation_id, one.identity.request_id}
        and not one.is_finished
    ]
    if not found:
        raise NotFoundError("no open request has this id")
    for generation in found:
        generation.fail(OperatorAbortError("an operator has ended this request"))
    aborted = [one.identity.generation_id for one in found]
    structlog.get_logger("machd.admin").warning("requests.aborted", ids=aborted)
    return AbortedRequests(aborted=aborted)


def _open_request(generation: Generation, now_s: float) -> OpenRequest:
    identity, usage = generation.identity, generation.usage
    admission, token_s = generation.admission, generation.first_token_s
    return OpenRequest(
        id=identity.generation_id,
        request_id=identity.request_id,
        endpoint=identity.endpoint,
        client=identity.client,
        state="waiting" if admission is None else "running",
        age_s=round(now_s - identity.arrived_s, 3),
        ttft_s=None if token_s is None else round(token_s - identity.arrived_s, 3),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        decode_mode=None if admission is None else admission.decode_mode.value,
    )
