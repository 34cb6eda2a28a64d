"""The admin endpoints, in the order of their documentation."""

from __future__ import annotations

from dataclasses import replace

from litestar.handlers import HTTPRouteHandler

from machd.admin.cache import clear_cache
from machd.admin.config import get_config, patch_config, reload, set_log_level
from machd.admin.errors import AdminErrorBody
from machd.admin.events import watch_events
from machd.admin.log import list_log_events
from machd.admin.memory import get_memory
from machd.admin.mode import drain, probe, resume, set_mode
from machd.admin.models import list_models, steer_model, steering_endpoints
from machd.admin.overview import get_overview, watch_overview
from machd.admin.pulling import pull_model, stop_pull
from machd.admin.requests import abort_requests, list_finished_requests, list_requests
from machd.admin.status import get_status
from machd.admin.warming import warm_cache
from machd.dialects.health import Health, get_health, get_health_live, get_health_ready
from machd.dialects.inspection import get_capabilities, get_metrics
from machd.http.endpoint import Answer, Endpoint, endpoint_of
from machd.served.capabilities import Capabilities

_OWN_HANDLERS = (
    get_status,
    get_config,
    patch_config,
    reload,
    drain,
    resume,
    set_mode,
    list_requests,
    list_finished_requests,
    abort_requests,
    clear_cache,
    warm_cache,
    probe,
    list_models,
    steer_model,
    pull_model,
    stop_pull,
    set_log_level,
    watch_events,
    get_overview,
    watch_overview,
    get_memory,
    list_log_events,
)
_SHARED_HANDLERS = (get_capabilities, get_metrics, get_health, get_health_live, get_health_ready)

ADMIN_HANDLERS = (*_OWN_HANDLERS, *_SHARED_HANDLERS)


def _shared(handler: HTTPRouteHandler) -> Endpoint:
    """Return a public endpoint as the admin listener has it; of health, the refusals are left out."""
    public = endpoint_of(handler)
    own = [one for one in public.answers if one.body in {None, Health, Capabilities}]
    statuses = {one.status for one in public.answers} - {one.status for one in own}
    refusals = [
        Answer(status, AdminErrorBody)
        for status in sorted(statuses | {401, 403, 421})
        if not public.public
    ]
    name = public.name.replace("get_", "get_admin_")
    return replace(public, name=name, answers=(*own, *refusals))


ADMIN_ENDPOINTS: tuple[Endpoint, ...] = (
    *(endpoint_of(one) for one in _OWN_HANDLERS if one is not steer_model),
    *steering_endpoints(),
    *map(_shared, _SHARED_HANDLERS),
)
