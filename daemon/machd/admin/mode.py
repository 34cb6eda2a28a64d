"""Operators' commands: drain, resume, switch the decode mode, measure."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import structlog
from litestar import Request
from litestar.di import NamedDependency

from machd.admin.config import body_timeout_s
from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.admin.status import (
    AdminState,
    ModeRequest,
    ModeStatus,
    ProbeReport,
    admin_state,
    mode_status,
)
from machd.dialects.bodies import read_body
from machd.errors import ModeUnavailableError
from machd.scheduler.events import DecodeMode
from machd.served.capabilities import wire_capabilities
from machd.settings.model import Settings


@endpoint("POST /admin/drain", AdminState, also=(409,))
async def drain(admin: NamedDependency[AdminContext]) -> AdminState:
    """Take nothing new and finish what there is; the process stays."""
    admin.lifecycle.hold()
    structlog.get_logger("machd.admin").info(
        "daemon.held", open_requests=len(admin.open_generations)
    )
    return admin_state(admin)


@endpoint("POST /admin/resume", AdminState, also=(409,))
async def resume(admin: NamedDependency[AdminContext]) -> AdminState:
    """Take new work again after a drain."""
    admin.lifecycle.resume()
    structlog.get_logger("machd.admin").info("daemon.resumed")
    return admin_state(admin)


@endpoint("POST /admin/mode", ModeStatus, takes=ModeRequest, also=(409,))
async def set_mode(
    request: Request[Any, Any, Any], admin: NamedDependency[AdminContext]
) -> ModeStatus:
    """Decode one at a time or in batches, once what runs is finished.

    Changes ``continuous_batching.enabled`` until the next reload.

    The switch itself happens when what runs is finished; requests that wait go on waiting.
    """
    body = await read_body(request, ModeRequest, timeout_s=body_timeout_s(admin))
    enabled = body.mode != "single"
    wanted = _with_batching(admin.configuration.settings, enabled=enabled)
    decision = admin.served.decode_mode_under(wanted)
    if enabled and decision.active is not DecodeMode.BATCHED:
        raise ModeUnavailableError(f"this model cannot be batched: {decision.reason}")
    await admin.configuration.patch({"continuous_batching": {"enabled": enabled}})
    return _mode(admin)


@endpoint("POST /admin/probe", ProbeReport, also=(409,))
async def probe(admin: NamedDependency[AdminContext]) -> ProbeReport:
    """Measure the model, for which running requests are suspended; answers when that is done.

    No request is admitted until then; one that waits is refused no later than without it. A daemon that
    leaves meanwhile breaks it off, and says so. A client that does not want to wait so long may leave: the
    measurement takes place all the same, and ``/v1/capabilities`` shows it.
    """
    model = admin.served.model
    await asyncio.shield(asyncio.wrap_future(admin.probe()))
    verdicts = admin.served.verdicts
    versions = msgspec.structs.replace(admin.versions, backend=model.backend, dtype=model.dtype)
    return ProbeReport(
        capabilities=wire_capabilities(
            model.architecture, model.cache, verdicts, versions, bitwise=admin.served.bitwise
        ),
        decode_mode=_mode(admin),
    )


def _with_batching(settings: Settings, *, enabled: bool) -> Settings:
    section = settings.continuous_batching.model_copy(update={"enabled": enabled})
    return settings.model_copy(update={"continuous_batching": section})


def _mode(admin: AdminContext) -> ModeStatus:
    mode = mode_status(admin)
    assert mode is not None, "the model is loaded"
    return mode
