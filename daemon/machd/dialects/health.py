"""The health endpoints."""

from __future__ import annotations

from typing import Literal

import msgspec
from litestar import Response
from litestar.di import NamedDependency
from msgspec import Struct

from machd.dialects.endpoint import endpoint
from machd.errors import MachdError
from machd.http.context import ServerContext
from machd.http.endpoint import Answer
from machd.process.lifecycle import State


class Health(Struct, frozen=True, kw_only=True):
    """The daemon's health: alive, or ready for work.

    Attributes:
        status: ``ok`` goes with 200, ``unavailable`` with 503.
        state: The daemon's state, such as ``ready`` or ``draining``.
        reason: Why it is unavailable; null while it is not.
    """

    status: Literal["ok", "unavailable"]
    state: str
    reason: str | None = None


@endpoint("GET|HEAD /health", Health, Answer(503, Health), public=True)
async def get_health(context: NamedDependency[ServerContext]) -> Response[bytes]:
    """The same as /health/live."""
    return _live(context)


@endpoint("GET|HEAD /health/live", Health, Answer(503, Health), public=True)
async def get_health_live(context: NamedDependency[ServerContext]) -> Response[bytes]:
    """Tell whether the engine's heartbeat is fresh."""
    return _live(context)


@endpoint("GET|HEAD /health/ready", Health, Answer(503, Health), public=True)
async def get_health_ready(context: NamedDependency[ServerContext]) -> Response[bytes]:
    """Tell whether the daemon should be sent new work.

    It should while an operator has the model measured: requests then queue as behind a long answer.
    It should not once a stop was asked for, although work is accepted for ``limits.drain_notice_s``.
    """
    lifecycle = context.service.lifecycle
    try:
        lifecycle.check_ready()
    except MachdError as error:
        return _answer(lifecycle.state, error.message)
    return _answer(lifecycle.state, None)


def _live(context: ServerContext) -> Response[bytes]:
    """Judge the heartbeat; a model that is still loading is alive."""
    state = context.service.lifecycle.state
    if state is State.FAILED:
        return _answer(state, "the engine has stopped")
    stall_timeout_s = context.settings.engine.stall_timeout_s
    if state is not State.LOADING and context.served.heartbeat_age_s > stall_timeout_s:
        return _answer(
            state, f"the engine has not moved for {context.served.heartbeat_age_s:.0f} s"
        )
    return _answer(state, None)


def _answer(state: State, reason: str | None) -> Response[bytes]:
    health = Health(
        status="ok" if reason is None else "unavailable", state=state.value, reason=reason
    )
    return Response(
        msgspec.json.encode(health),
        status_code=200 if reason is None else 503,
        media_type="application/json",
    )
