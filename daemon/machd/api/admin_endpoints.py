"""The admin endpoints as plain data: what each takes and every answer it can give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from machd.api.admin_cache import CacheCleared, CacheWarmed, WarmRequest
from machd.api.admin_config import AdminConfig, ConfigChange, ConfigPatch, LogLevelRequest
from machd.api.admin_errors import AdminErrorBody
from machd.api.admin_events import AdminEvent
from machd.api.admin_requests import AbortedRequests, OpenRequestList
from machd.api.admin_status import (
    AdminState,
    AdminStatus,
    ModeRequest,
    ModeStatus,
    ProbeReport,
)
from machd.api.endpoints import EVENTS, METRICS_TEXT, Answer
from machd.api.health import Health


@dataclass(frozen=True, slots=True)
class AdminEndpoint:
    """One method on one path of the admin listener.

    Attributes:
        name: The operation's id, in snake case.
        path: With ``{parameter}`` for a segment that the client fills in.
        request: The type of the body it takes; None without one.
        public: Whether it answers without the admin token.
    """

    name: str
    method: Literal["get", "post", "put", "patch", "delete"]
    path: str
    summary: str
    answers: tuple[Answer, ...]
    request: object | None = None
    public: bool = False


def _answers(body: type[Struct], *errors: int) -> tuple[Answer, ...]:
    """A success, and errors: 401, 403, 421 and 503 for every one of them."""
    statuses = sorted({401, 403, 421, 500, 503, *errors})
    return (Answer(200, body), *(Answer(status, AdminErrorBody) for status in statuses))


def _posted(body: type[Struct], *errors: int) -> tuple[Answer, ...]:
    return _answers(body, 400, 408, 413, 415, *errors)


_HEALTH = (Answer(200, Health), Answer(503, Health))

ADMIN_ENDPOINTS: tuple[AdminEndpoint, ...] = (
    AdminEndpoint(
        name="get_status",
        method="get",
        path="/admin/status",
        summary="State, decode mode, load, memory, the last change of the settings",
        answers=_answers(AdminStatus),
    ),
    AdminEndpoint(
        name="get_config",
        method="get",
        path="/admin/config",
        summary="The settings in force with their origins; secrets masked; the ETag names them",
        answers=_answers(AdminConfig),
    ),
    AdminEndpoint(
        name="patch_config",
        method="patch",
        path="/admin/config",
        summary="Change settings until the next reload; with If-Match, only those that were read",
        request=ConfigPatch,
        answers=_posted(ConfigChange, 409, 412),
    ),
    AdminEndpoint(
        name="reload",
        method="post",
        path="/admin/reload",
        summary="Read every source of settings again, as SIGHUP does",
        answers=_answers(ConfigChange, 400, 409),
    ),
    AdminEndpoint(
        name="drain",
        method="post",
        path="/admin/drain",
        summary="Take nothing new and finish what there is; the process stays",
        answers=_answers(AdminState, 409),
    ),
    AdminEndpoint(
        name="resume",
        method="post",
        path="/admin/resume",
        summary="Take new work again after a drain",
        answers=_answers(AdminState, 409),
    ),
    AdminEndpoint(
        name="set_mode",
        method="post",
        path="/admin/mode",
        summary="Decode one at a time or in batches, once what runs is finished",
        request=ModeRequest,
        answers=_posted(ModeStatus, 409),
    ),
    AdminEndpoint(
        name="list_requests",
        method="get",
        path="/admin/requests",
        summary="The open requests: who and how far, never what",
        answers=_answers(OpenRequestList),
    ),
    AdminEndpoint(
        name="abort_requests",
        method="delete",
        path="/admin/requests/{id}",
        summary="End the open requests of an X-Request-Id, or the one of an answer's id",
        answers=_answers(AbortedRequests, 404),
    ),
    AdminEndpoint(
        name="clear_cache",
        method="post",
        path="/admin/cache/clear",
        summary="Forget the stored responses and the prefix cache, with disk=true also on disk",
        answers=_answers(CacheCleared, 400, 409),
    ),
    AdminEndpoint(
        name="warm_cache",
        method="post",
        path="/admin/cache/warm",
        summary="Compute prompts, one after the other, and keep them for later requests",
        request=WarmRequest,
        answers=_posted(CacheWarmed, 404, 409),
    ),
    AdminEndpoint(
        name="probe",
        method="post",
        path="/admin/probe",
        summary="Measure the model at the next idle moment; answers when that is done",
        answers=_answers(ProbeReport, 409),
    ),
    AdminEndpoint(
        name="set_log_level",
        method="put",
        path="/admin/log-level",
        summary="Log more or less until the next reload",
        request=LogLevelRequest,
        answers=_posted(ConfigChange, 409),
    ),
    AdminEndpoint(
        name="watch_events",
        method="get",
        path="/admin/events",
        summary="What happens, as it happens, without any text or tokens",
        answers=(
            Answer(200, AdminEvent, EVENTS),
            *(Answer(status, AdminErrorBody) for status in (401, 403, 421, 503)),
        ),
    ),
    AdminEndpoint(
        name="get_admin_metrics",
        method="get",
        path="/metrics",
        summary="Metrics in Prometheus' text format",
        answers=(
            Answer(200, None, METRICS_TEXT),
            *(Answer(status, AdminErrorBody) for status in (401, 403, 421)),
        ),
    ),
    *(
        AdminEndpoint(
            name=name,
            method="get",
            path=path,
            summary=summary,
            answers=_HEALTH,
            public=True,
        )
        for name, path, summary in (
            ("get_admin_health", "/health", "The same as /health/live"),
            ("get_admin_health_live", "/health/live", "Whether the engine's heartbeat is fresh"),
            ("get_admin_health_ready", "/health/ready", "Whether the daemon accepts work"),
        )
    ),
)
