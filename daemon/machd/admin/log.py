"""The last events of the log, of the front and of the engine processes."""

from __future__ import annotations

from typing import Any, get_args

from litestar import Request
from litestar.di import NamedDependency
from msgspec import Struct

from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.errors import InvalidRequestError
from machd.link.logged_event import LoggedEvent
from machd.settings.model import LogLevel


class LoggedEventList(Struct, frozen=True, kw_only=True):
    """The last events of the log, the oldest first."""

    events: list[LoggedEvent]


@endpoint("GET /admin/log", LoggedEventList, also=(400,))
async def list_log_events(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> LoggedEventList:
    """The last 500 events of the log, as they were logged; ``?level=`` leaves out lower ones.

    The oldest first.
    """
    level = request.query_params.get("level", "debug")
    if level not in get_args(LogLevel):
        raise InvalidRequestError.at("level", f"is one of {', '.join(get_args(LogLevel))}")
    events, _ = admin.log.newest(level)
    return LoggedEventList(events=events)
