"""The admin endpoints as plain data: what each takes and every answer it can give."""

from __future__ import annotations

from msgspec import Struct

from machd.admin.cache import CacheCleared
from machd.admin.config import AdminConfig, ConfigChange, ConfigPatch, LogLevelRequest
from machd.admin.errors import AdminErrorBody
from machd.admin.event_feed import AdminEvent
from machd.admin.requests import AbortedRequests, OpenRequestList
from machd.admin.status import (
    AdminState,
    AdminStatus,
    ModeRequest,
    ModeStatus,
    ProbeReport,
)
from machd.admin.warming import CacheWarmed, WarmRequest
from machd.http.endpoint import EVENTS, METRICS_TEXT, Answer, Endpoint
from machd.http.health import Health


def _answers(body: type[Struct], *errors: int) -> tuple[Answer, ...]:
    """A success, and errors: 401, 403, 421 and 503 for every one of them."""
    statuses = sorted({401, 403, 421, 500, 503, *errors})
    return (Answer(200, body), *(Answer(status, AdminErrorBody) for status in statuses))


def _posted(body: type[Struct], *errors: int) -> tuple[Answer, ...]:
    return _answers(body, 400, 408, 413, 415, *errors)


def _health(name: str, path: str, summary: str) -> Endpoint:
    return Endpoint(
        name, f"GET {path}", summary, (Answer(200, Health), Answer(503, Health)), public=True
    )


ADMIN_ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        name="get_status",
        route="GET /admin/status",
        summary="State, decode mode, load, memory, the last change of the settings",
        answers=_answers(AdminStatus),
    ),
    Endpoint(
        name="get_config",
        route="GET /admin/config",
        summary="The settings in force with their origins; secrets masked; the ETag names them",
        answers=_answers(AdminConfig),
    ),
    Endpoint(
        name="patch_config",
        route="PATCH /admin/config",
        summary="Change settings until the next reload; with If-Match, only those that were read",
        request=ConfigPatch,
        answers=_posted(ConfigChange, 409, 412),
    ),
    Endpoint(
        name="reload",
        route="POST /admin/reload",
        summary="Read every source of settings again, as SIGHUP does",
        answers=_answers(ConfigChange, 400, 409),
    ),
    Endpoint(
        name="drain",
        route="POST /admin/drain",
        summary="Take nothing new and finish what there is; the process stays",
        answers=_answers(AdminState, 409),
    ),
    Endpoint(
        name="resume",
        route="POST /admin/resume",
        summary="Take new work again after a drain",
        answers=_answers(AdminState, 409),
    ),
    Endpoint(
        name="set_mode",
        route="POST /admin/mode",
        summary="Decode one at a time or in batches, once what runs is finished",
        request=ModeRequest,
        answers=_posted(ModeStatus, 409),
    ),
    Endpoint(
        name="list_requests",
        route="GET /admin/requests",
        summary="The open requests: who and how far, never what",
        answers=_answers(OpenRequestList),
    ),
    Endpoint(
        name="abort_requests",
        route="DELETE /admin/requests/{id}",
        summary="End the open requests of an X-Request-Id, or the one of an answer's id",
        answers=_answers(AbortedRequests, 404),
    ),
    Endpoint(
        name="clear_cache",
        route="POST /admin/cache/clear",
        summary="Forget the stored responses and the prefix cache, with disk=true also on disk",
        answers=_answers(CacheCleared, 400, 409),
    ),
    Endpoint(
        name="warm_cache",
        route="POST /admin/cache/warm",
        summary="Compute prompts, one after the other, and keep them for later requests",
        request=WarmRequest,
        answers=_posted(CacheWarmed, 404, 409),
    ),
    Endpoint(
        name="probe",
        route="POST /admin/probe",
        summary="Measure the model at the next idle moment; answers when that is done",
        answers=_answers(ProbeReport, 409),
    ),
    Endpoint(
        name="set_log_level",
        route="PUT /admin/log-level",
        summary="Log more or less until the next reload",
        request=LogLevelRequest,
        answers=_posted(ConfigChange, 409),
    ),
    Endpoint(
        name="watch_events",
        route="GET /admin/events",
        summary="What happens, as it happens, without any text or tokens",
        answers=(
            Answer(200, AdminEvent, EVENTS),
            *(Answer(status, AdminErrorBody) for status in (401, 403, 421, 503)),
        ),
    ),
    Endpoint(
        name="get_admin_metrics",
        route="GET /metrics",
        summary="Metrics in Prometheus' text format",
        answers=(
            Answer(200, None, METRICS_TEXT),
            *(Answer(status, AdminErrorBody) for status in (401, 403, 421)),
        ),
    ),
    _health("get_admin_health", "/health", "The same as /health/live"),
    _health("get_admin_health_live", "/health/live", "Whether the engine's heartbeat is fresh"),
    _health("get_admin_health_ready", "/health/ready", "Whether the daemon accepts work"),
)
